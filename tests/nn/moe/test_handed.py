"""The gradient of SwiGLU is found by the map in front: the bits of one that is written between, and less memory."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

import te_dist as te
from te_dist.nn import group_fronts, grouped_products
from te_dist.nn.group_fronts import GATHERED, SUMMED, WEIGHTED_SWIGLU
from te_dist.nn.moe import MoE, experts
from te_dist.nn.moe.dispatch import Arrived
from te_dist.ops.source import SwiGluGradient
from te_dist.testing import assert_bitwise
from tests.nn.moe.test_block import RECIPES, every_recipe, make, run, tokens

TOKENS = 40


def in_turn(maps: Any, rows: Tensor, arrived: Arrived, *, given: Any) -> Tensor:
    """What `experts.multiply` gives, by maps that know nothing of each other."""
    index, _, positions, _ = arrived.by_expert
    (fc1, first), (fc2, second) = maps
    hidden = fc1(rows, [first], beside=[index, positions], given=given._replace(front=GATHERED))
    weighted = given._replace(front=WEIGHTED_SWIGLU, epilogue=SUMMED)
    return fc2(hidden, [second], beside=[arrived.probabilities], behind=[index, positions], given=weighted)


def freeze(module: MoE, *names: str) -> MoE:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "frozen",
    [(), ("experts.fc1.weight",), ("experts.fc2.weight",), ("experts.fc1.weight", "experts.fc2.weight")],
    ids=["none", "first", "second", "both"],
)
@pytest.mark.parametrize("saves", [False, True], ids=["quantized", "original"])
@every_recipe
def test_bits_are_those_of_a_gradient_that_is_written(
    name: str, saves: bool, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"save_original_input": True} if saves and name != "delayed" else {}
    got = run(freeze(make(**made), *frozen), name, tokens(TOKENS))
    monkeypatch.setattr(experts, "multiply", in_turn)
    want = run(freeze(make(**made), *frozen), name, tokens(TOKENS))
    assert sum(value is None for value in want) == len(frozen)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            assert_bitwise(a, b, f"result {number}")


@pytest.mark.parametrize(
    ("name", "written"), [("block", 0), ("mxfp8", 0), ("delayed", 0), ("current", 1), ("nvfp4", 1), ("plain", 1)]
)
def test_it_is_written_only_for_what_reads_it_twice_or_as_it_is(
    name: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def values(source: Any) -> Any:
        seen.append(source)
        return evaluate(source)

    evaluate = group_fronts.values
    for module in (group_fronts, grouped_products):
        monkeypatch.setattr(module, "values", values)
    run(make(), name, tokens(TOKENS))
    assert sum(isinstance(source, SwiGluGradient) for source in seen) == written


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every backward pass of the first map: whether the rows are there when its products are computed."""
    found: list[bool] = []
    rows: list[weakref.ref[Tensor]] = []
    read, multiply = grouped_products.read_handed, grouped_products._gradients

    def reading(of: Any, *rest: Any) -> Any:
        rows.append(weakref.ref(of.rows))
        return read(of, *rest)

    def multiplying(*args: Any) -> Any:
        if rows:
            found.append(rows.pop()() is not None)
        return multiply(*args)

    monkeypatch.setattr(grouped_products, "read_handed", reading)
    monkeypatch.setattr(grouped_products, "_gradients", multiplying)
    return found


def backward(module: MoE, x: Tensor, **options: Any) -> Tensor:
    with te.autocast(recipe=RECIPES["block"]):
        out = module(x)
    out.sum().backward(**options)
    return out


def test_rows_are_let_go_before_the_products(alive: list[bool]) -> None:
    backward(make(), tokens(TOKENS))
    assert alive == [not hasattr(torch.autograd.Function, "maybe_clear_saved_tensors")]


def test_rows_stay_for_another_backward_pass(alive: list[bool]) -> None:
    module = make()
    out = backward(module, tokens(TOKENS), retain_graph=True)
    want = [param.grad.clone() for param in module.parameters()]
    assert alive == [True]
    module.zero_grad()
    out.sum().backward()
    for param, wanted in zip(module.parameters(), want, strict=True):
        assert_bitwise(param.grad, wanted, "gradient of the second pass")


def hooked(module: MoE, where: str, seen: list[Tensor]) -> Any:
    fc1 = module.experts.fc1.gemm
    if where == "global":
        return register_module_forward_hook(lambda mod, _, out: seen.append(out) if mod is fc1 else None)
    if where == "backward":
        return fc1.register_full_backward_hook(lambda _, __, grads: seen.extend(grads))
    return fc1.register_forward_hook(lambda _, __, out: seen.append(out))


@pytest.mark.parametrize("where", ["forward", "backward", "global"])
def test_hooks_see_rows_and_gradients_that_stay_what_they_are(where: str) -> None:
    want, module, seen = run(make(), "block", tokens(TOKENS)), make(), []
    handle = hooked(module, where, seen)
    try:
        got = run(module, "block", tokens(TOKENS))
    finally:
        handle.remove()
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {number}")
    (rows,) = seen
    assert rows.shape == (TOKENS * 2, 2 * 128) and rows.isfinite().all()
    assert where == "backward" or rows.requires_grad


FIRST, SECOND = "experts.fc1.weight", "experts.fc2.weight"


@pytest.mark.parametrize("frozen", [(), (SECOND,), (FIRST,), (FIRST, SECOND), ("router.weight",)], ids=str)
@pytest.mark.parametrize("asks", [True, False], ids=["input", "no input"])
def test_histories_move_as_if_the_gradient_were_written(
    asks: bool, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for multiply in (experts.multiply, in_turn):
        monkeypatch.setattr(experts, "multiply", multiply)
        module = freeze(make(), *frozen)
        for step in range(3):
            with te.autocast(recipe=RECIPES["delayed"]):
                out = module((tokens(TOKENS, seed=step) * 2**step).requires_grad_(asks))
            out.sum().backward()
        states.append({key: value for key, value in module.state_dict().items() if "scaling" in key})
    got, want = states
    assert any("fc2" in key for key in want) and any("fc1" in key for key in want)
    for key, value in want.items():
        assert_bitwise(got[key], value, key)


@pytest.mark.parametrize("asks", [True, False], ids=["input", "no input"])
def test_a_gradient_of_probabilities_alone_moves_no_history_and_multiplies_nothing(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, products = make(), []
    run(module, "delayed", tokens(TOKENS))
    with te.autocast(recipe=RECIPES["delayed"]):
        out = module(tokens(TOKENS).requires_grad_(asks))
    before = {key: value.clone() for key, value in module.experts.fc1.state_dict().items() if "scaling" in key}
    for name in ("multiply_rows", "multiply_sums"):
        function = getattr(grouped_products, name)
        monkeypatch.setattr(grouped_products, name, lambda *args, f=function, n=name: products.append(n) or f(*args))
    torch.autograd.grad(out.sum(), module.router.weight)
    assert products.count("multiply_rows") == 1  # by the second map
    for key, value in before.items():
        assert_bitwise(module.experts.fc1.state_dict()[key], value, key)


@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_what_runs_again_does_what_it_did_whatever_hooks_there_are(watched: str) -> None:
    want, module = run(make(), "block", tokens(TOKENS)), make()
    x = tokens(TOKENS).requires_grad_()
    torch.manual_seed(3)
    with ModuleTracker() if watched == "forward" else nullcontext(), te.autocast(recipe=RECIPES["block"]):
        out = checkpoint(module, x, use_reentrant=False, context_fn=te.recompute.context_fn)
    with ModuleTracker() if watched == "backward" else nullcontext():
        out.backward(tokens(TOKENS, seed=2))
    got = [out.detach(), x.grad, *(param.grad for param in module.parameters())]
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {number}")


def test_compiled_backward_passes_take_it() -> None:
    want, module = run(make(), "block", tokens(TOKENS)), make()
    x = tokens(TOKENS).requires_grad_()
    torch.manual_seed(3)
    with te.autocast(recipe=RECIPES["block"]):
        out = module(x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(tokens(TOKENS, seed=2))
    got = [out.detach(), x.grad, *(param.grad for param in module.parameters())]
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {number}")


def test_gradients_of_part_of_the_graph_are_those_of_all() -> None:
    module, x = make(), tokens(TOKENS).requires_grad_()
    backward(module, x)
    with te.autocast(recipe=RECIPES["block"]):
        out = module(x)
    for name in ("experts.fc2.weight", "experts.fc1.weight", "router.weight"):
        param = module.get_parameter(name)
        (got,) = torch.autograd.grad(out.sum(), param, retain_graph=True)
        assert_bitwise(got, param.grad, name)


def test_a_front_is_named_apart_once_it_is_handed() -> None:
    assert WEIGHTED_SWIGLU.handed().name != WEIGHTED_SWIGLU.name
    assert WEIGHTED_SWIGLU.handed().gradient is None
