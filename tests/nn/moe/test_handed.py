"""The gradient of SwiGLU is found by the map in front: the bits of one that is written between, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist as te
from te_dist.nn import group_fronts, grouped_products
from te_dist.nn.group_fronts import WEIGHTED_SWIGLU
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
    hidden = fc1(rows, [first], beside=[index, positions], given=given._replace(front=experts.GATHERED))
    weighted = given._replace(front=WEIGHTED_SWIGLU, epilogue=experts.SUMMED)
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


@pytest.mark.parametrize(("name", "written"), [("block", 0), ("mxfp8", 0), ("current", 1), ("nvfp4", 1), ("plain", 1)])
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


class Kept:
    """What is made of rows and of the gradient of their values, while a backward pass runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []
        read = grouped_products._read_handed

        def noting(of: Any, *rest: Any) -> Any:
            self.found.append((of.rows, of.grad))
            return read(of, *rest)

        monkeypatch.setattr(grouped_products, "_read_handed", noting)

    @property
    def bytes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.untyped_storage().nbytes() for tensor in pair) for pair in self.found]


def backward(module: MoE, x: Tensor, **options: Any) -> Tensor:
    with te.autocast(recipe=RECIPES["block"]):
        out = module(x)
    out.sum().backward(**options)
    return out


def test_neither_rows_nor_their_gradient_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    backward(make(), tokens(TOKENS))
    assert kept.bytes == [(0, 0)]


def test_both_stay_for_another_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, module = Kept(monkeypatch), make()
    out = backward(module, tokens(TOKENS), retain_graph=True)
    want = [param.grad.clone() for param in module.parameters()]
    assert all(min(pair) > 0 for pair in kept.bytes)
    module.zero_grad()
    out.sum().backward()
    assert kept.bytes[1] == (0, 0)
    for param, wanted in zip(module.parameters(), want, strict=True):
        assert_bitwise(param.grad, wanted, "gradient of the second pass")


def test_what_hooks_hold_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, held = Kept(monkeypatch), []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), te.autocast(recipe=RECIPES["block"]):
        out = make()(tokens(TOKENS))
    out.sum().backward()
    ((rows, grad),) = kept.bytes
    assert rows > 0 and grad == 0
    assert all(tensor.numel() == 0 or tensor.untyped_storage().nbytes() for tensor in held if type(tensor) is Tensor)


def test_gradients_of_part_of_the_graph_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
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
