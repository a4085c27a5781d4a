"""SwiGLU in front of the second map of a LayerNormMLP: the bits of the activation written and then quantized."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

import te_dist as te
from te_dist import recipe
from te_dist.nn import products
from te_dist.ops.evaluate import values
from te_dist.ops.source import SwiGlu, SwiGluGradient
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES

every_case = pytest.mark.parametrize("name", CASES)


class WrittenSwiGlu(torch.autograd.Function):
    """The activation and its gradient, each a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return values(SwiGlu(x.flatten(0, -2))).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return values(SwiGluGradient(x.flatten(0, -2), grad.flatten(0, -2))).view(x.shape)


def make(width: int = 64, hidden: int = 96) -> te.LayerNormMLP:
    torch.manual_seed(0)
    return te.LayerNormMLP(width, hidden, activation="swiglu", normalization="RMSNorm")


def written(module: te.LayerNormMLP, x: Tensor) -> Tensor:
    """What the module computes, a step at a time."""
    hidden = module.fc1(module._normalize(x), module.fc1_weight, module.fc1_bias)
    return module.fc2(WrittenSwiGlu.apply(hidden), module.fc2_weight, module.fc2_bias)


def results(call: Any, module: te.LayerNormMLP, made_by: recipe.Recipe | None, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one pass."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = call(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return [out.detach(), x.grad, *(param.grad for param in module.parameters())]


def check(got: list[Tensor], want: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, str(index))


def sample(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@every_case
@pytest.mark.parametrize("shape", [(48, 64), (2, 5, 64)])
def test_bits_of_the_written_activation(name: str, shape: tuple[int, ...]) -> None:
    made_by, x = CASES[name].recipe, sample(*shape)
    module, composed = make(), make()
    want = results(lambda x: written(composed, x), composed, made_by, x)
    check(results(module, module, made_by, x), want)


def test_bits_in_bf16() -> None:
    made_by, x = recipe.MXFP8BlockScaling(), sample(48, 64).bfloat16()
    module, composed = make().bfloat16(), make().bfloat16()
    check(results(module, module, made_by, x), results(lambda x: written(composed, x), composed, made_by, x))


def test_neither_the_activation_nor_its_gradient_is_written(monkeypatch) -> None:
    calls: list[str] = []
    evaluate = te._C.evaluate
    monkeypatch.setattr(te._C, "evaluate", lambda read, *rest: (calls.append(read[1]), evaluate(read, *rest)))
    module = make()
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        out = module(sample(64, 64))
    assert calls == []
    out.sum().backward()
    assert calls == []


def test_the_gradient_is_written_for_what_reads_it_twice(monkeypatch) -> None:
    calls: list[str] = []
    evaluate = te._C.evaluate
    monkeypatch.setattr(te._C, "evaluate", lambda read, *rest: (calls.append(read[1]), evaluate(read, *rest)))
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        out = make()(sample(64, 64))
    out.sum().backward()
    assert calls == ["swiglu_gradient"]


@pytest.mark.parametrize("where", ["first", "second", "global"])
@pytest.mark.parametrize("name", ["block", "delayed"])
def test_hooks_see_gradients_that_stay_what_they_are(name: str, where: str) -> None:
    made_by, x, seen = CASES[name].recipe, sample(48, 64), []
    module, watched = make(), make()
    site = watched.fc2 if where == "second" else watched.fc1
    if where == "global":
        handle = register_module_full_backward_hook(lambda mod, _, grads: seen.extend(grads) if mod is site else None)
    else:
        handle = site.register_full_backward_hook(lambda *_: seen.extend(_[2]))
    try:
        got = results(watched, watched, made_by, x)
    finally:
        handle.remove()
    check(got, results(module, module, made_by, x))
    (grad,) = seen
    assert grad.shape == (48, 64 if where == "second" else 192) and grad.abs().sum() > 0


def compile_each(module: te.LayerNormMLP, *names: str, wraps: bool) -> te.LayerNormMLP:
    for name in names:
        if wraps:
            setattr(module, name, torch.compile(module.get_submodule(name), backend="eager"))
        else:
            module.get_submodule(name).compile(backend="eager")
    return module


@pytest.mark.parametrize("wraps", [False, True], ids=["in place", "wrapped"])
@pytest.mark.parametrize("names", [("fc1",), ("fc2",), ("fc1", "fc2")], ids=" ".join)
@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_maps_that_are_compiled_by_themselves_have_the_bits_of_eager(
    name: str, names: tuple[str, ...], wraps: bool
) -> None:
    torch.compiler.reset()
    made_by, x = CASES[name].recipe, sample(2, 64)
    module, compiled = make(), compile_each(make(), *names, wraps=wraps)
    check(results(compiled, compiled, made_by, x), results(module, module, made_by, x))
    torch.compiler.reset()


def test_a_map_that_is_wrapped_runs_as_its_wrapper_says() -> None:
    made_by, x, ran = CASES["mxfp8"].recipe, sample(64, 64), []
    module, wrapped = make(), make()
    forward = wrapped.fc1.forward
    wrapped.fc1.forward = lambda *args, **fronts: ran.append(fronts) or forward(*args, **fronts)
    wrapped.fc1 = checkpoint_wrapper(wrapped.fc1, context_fn=te.recompute.context_fn)
    got = results(wrapped, wrapped, made_by, x)
    check(got, results(module, module, made_by, x))
    assert len(ran) == 2


@pytest.mark.parametrize("watched", ["forward", "backward"])
@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_what_runs_again_does_what_it_did_whatever_hooks_there_are(name: str, watched: str) -> None:
    made_by, x = CASES[name].recipe, sample(64, 64)
    module, again = make(), make()
    want = results(module, module, made_by, x)
    asking = x.clone().requires_grad_()
    with ModuleTracker() if watched == "forward" else nullcontext(), te.autocast(recipe=made_by):
        out = checkpoint(again, asking, use_reentrant=False, context_fn=te.recompute.context_fn)
    with ModuleTracker() if watched == "backward" else nullcontext():
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    check([out.detach(), asking.grad, *(param.grad for param in again.parameters())], want)


@every_case
@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight", "fc1_bias", "fc1_weight fc1_bias"])
def test_bits_of_the_written_gradient_where_parts_are_frozen(name: str, frozen: str) -> None:
    made_by = CASES[name].recipe
    module, composed = make(), make()
    for each in (module, composed):
        for part in frozen.split():
            each.get_parameter(part).requires_grad_(False)
    for step in range(2):  # histories move alike
        x = sample(48, 64, seed=step)
        got, want = results(module, module, made_by, x), results(lambda x: written(composed, x), composed, made_by, x)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert (a is None) == (b is None), index
            assert a is None or assert_bitwise(a, b, str(index)) is None
        same = composed.state_dict()
        for key, value in module.state_dict().items():
            assert_bitwise(value, same[key], key)


def test_the_output_of_the_first_map_is_let_go_before_its_products(monkeypatch) -> None:
    rows, alive = [], []
    read, multiply = products._read_handed, products.backward

    def reading(of: Any, given: Tensor, *rest: Any) -> Any:
        rows.append(weakref.ref(given))
        return read(of, given, *rest)

    def multiplying(of: Any, plan: Any) -> Any:
        if of.read is not None:
            alive.append(rows[-1]() is not None)
        return multiply(of, plan)

    monkeypatch.setattr(products, "_read_handed", reading)
    monkeypatch.setattr(products, "backward", multiplying)
    for keeps in (True, False):
        with te.autocast(recipe=recipe.MXFP8BlockScaling()):
            out = make()(sample(64, 64))
        out.sum().backward(retain_graph=keeps)
    assert alive == [True, not hasattr(torch.autograd.Function, "maybe_clear_saved_tensors")]


def test_without_a_recipe_torch_computes_it() -> None:
    module, x = make(), sample(5, 64)
    hidden = module.fc1(module._normalize(x), module.fc1_weight, module.fc1_bias)
    gate, up = hidden.chunk(2, dim=-1)
    want = module.fc2(torch.nn.functional.silu(gate) * up, module.fc2_weight, module.fc2_bias)
    assert_bitwise(module(x), want, "plain")


def test_who_sees_the_input_of_the_map_sees_the_activation() -> None:
    module, seen = make(), []
    module.fc2.register_forward_pre_hook(lambda site, args: seen.append(args[0].shape))
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        module(sample(32, 64))
    assert seen == [(32, 96)]


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_a_compiled_module_has_the_bits_of_eager(name: str) -> None:
    torch.compiler.reset()
    module, made_by = make(), CASES[name].recipe
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = sample(2, 24, 64, seed=seed)
        check(results(compiled, module, made_by, x), results(module, module, made_by, x))
    check(results(compiled, module, None, x), results(module, module, None, x))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["delayed", "block", "nvfp4"])
def test_recomputing_gives_the_same_bits(name: str) -> None:
    made_by, x = CASES[name].recipe, sample(48, 64)
    module, again = make(), make()
    want = results(module, module, made_by, x)
    check(results(lambda x: te.checkpoint(again, x), again, made_by, x), want)
