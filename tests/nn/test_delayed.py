"""Delayed scaling: the history against sequences worked out by hand, and the state as part of the module."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist as te
from te_dist import checkpoints, fsdp2, recipe
from te_dist.fsdp2.ahead import kernels_of
from te_dist.scaling.history import DelayedScalingRequest
from te_dist.testing import assert_bitwise

E4M3, E5M2 = 448.0, 57344.0
RECIPE = recipe.DelayedScaling(amax_history_len=3)


def test_a_margin_leaves_powers_of_two_unused() -> None:
    assert DelayedScalingRequest("e4m3", margin=2).scaled_max == E4M3 / 4
    assert DelayedScalingRequest("e5m2").scaled_max == E5M2


def linear() -> te.Linear:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPE):
        return te.Linear(16, 32, bias=False)


def train(module: te.Linear, largest: float, largest_grad: float) -> None:
    """One step whose input and gradient have these largest magnitudes."""
    x, grad = torch.full((4, 16), largest / 2), torch.full((4, 32), -largest_grad / 2)
    x[1, 2], grad[3, 4] = -largest, largest_grad
    with te.autocast(recipe=RECIPE):
        module(x.requires_grad_()).backward(grad)


def test_assigned_buffers_are_copied() -> None:
    """They may lie apart, in another type, or be those of another module."""
    modules = [linear() for _ in range(4)]
    train(modules[0], 3.0, 5.0)
    kept = modules[0].gemm.scaling.state_dict()
    spread = {name: torch.stack((t, t), -1)[..., 0] for name, t in kept.items()}
    halves = {name: t.bfloat16() for name, t in kept.items()}
    for module, held in zip(modules[1:], (kept, spread, halves), strict=True):
        module.gemm.scaling.load_state_dict(held, assign=True)
    for module in modules:
        train(module, 2.0, 9.0)
    for module in modules[1:3]:
        for name, buffer in module.gemm.scaling.named_buffers():
            assert buffer.is_contiguous()
            assert_bitwise(buffer, modules[0].gemm.scaling.get_buffer(name), name)
    assert all(buffer.dtype == torch.float32 for buffer in modules[3].gemm.scaling.buffers())


def test_a_rehearsal_leaves_a_step_that_is_under_way_alone() -> None:
    modules = [linear(), linear()]
    for module in modules:
        train(module, 3.0, 5.0)
        with te.autocast(recipe=RECIPE):
            out = module(torch.full((4, 16), 7.0, requires_grad=True))
        state = module.gemm.scaling
        places = [t.data_ptr() for t in (*state.buffers(), state.running, state.scaled_max)]
        if module is modules[0]:
            te.prepare(module, RECIPE)
            assert kernels_of(module)
        assert [t.data_ptr() for t in (*state.buffers(), state.running, state.scaled_max)] == places
        out.sum().backward()
    for name, buffer in modules[0].gemm.scaling.named_buffers():
        assert_bitwise(buffer, modules[1].gemm.scaling.get_buffer(name), name)


def test_a_model_that_is_gone_takes_part_in_no_step() -> None:
    module = linear()
    with te.autocast(recipe=RECIPE):
        module(torch.ones(4, 16, requires_grad=True))
    state = weakref.ref(module.gemm.scaling)
    del module
    gc.collect()
    assert state() is None


def test_a_sequence_of_steps() -> None:
    module = linear()
    state = module.gemm.scaling
    assert list(state.requests) == ["input", "grad_output"]
    assert_bitwise(state.scale, torch.ones(2), "before the first step")
    expected = [
        # (input, gradient) of a step -> scales and history after it
        ((2.0, 0.5), (E4M3 / 2, E5M2 / 0.5), [[0, 0], [0, 0], [2, 0.5]]),
        ((8.0, 0.25), (E4M3 / 8, E5M2 / 0.5), [[0, 0], [2, 0.5], [8, 0.25]]),
        ((1.0, 0.25), (E4M3 / 8, E5M2 / 0.5), [[0, 0], [8, 0.25], [1, 0.25]]),
        ((1.0, 0.25), (E4M3 / 8, E5M2 / 0.25), [[0, 0], [1, 0.25], [1, 0.25]]),
        ((1.0, 0.25), (E4M3 / 1, E5M2 / 0.25), [[0, 0], [1, 0.25], [1, 0.25]]),
    ]
    for largest, scales, history in expected:
        train(module, *largest)
        assert_bitwise(state.scale, torch.tensor(scales), "scales")
        assert_bitwise(state.amax_history, torch.tensor(history, dtype=torch.float32), "history")


def test_a_step_multiplies_by_the_scales_of_the_step_before() -> None:
    module = linear()
    train(module, 2.0, 0.5)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        train(module, 8.0, 0.25)
    inputs = seen[0]
    assert_bitwise(inputs.scale_inv, torch.tensor([[2 / E4M3]]), "scale of the step before")
    assert inputs.dequantize().abs().max() == 2.0, "what is larger is clamped"


def test_several_forward_passes_count_together() -> None:
    module = linear()
    with te.autocast(recipe=RECIPE):
        first = module(torch.full((4, 16), 3.0))
        second = module(torch.full((4, 16), 2.0))
    (first + second).sum().backward()
    assert_bitwise(module.gemm.scaling.amax_history[-1], torch.tensor([3.0, 1.0]), "the larger one")


def test_passes_without_gradients_leave_no_trace() -> None:
    module = linear()
    with te.autocast(recipe=RECIPE), torch.no_grad():
        module(torch.ones(4, 16))
    assert_bitwise(module.gemm.scaling.amax_history, torch.zeros(3, 2), "history")


def test_an_evaluation_may_come_first() -> None:
    module, made_by, x = te.Linear(32, 32), recipe.DelayedScaling(), torch.ones(4, 32)
    with torch.inference_mode(), te.autocast(recipe=made_by):
        module(x)
    with te.autocast(recipe=made_by):
        module(x).sum().backward()
    assert module.gemm.scaling.amax_history.count_nonzero() == len(module.gemm.scaling.requests)


def test_state_is_saved_and_resumed_bitwise() -> None:
    module, other = linear(), linear()
    for _ in range(2):
        train(module, 3.0, 0.5)
    state = copy.deepcopy(module.state_dict())
    assert {"gemm.scaling.scale", "gemm.scaling.amax_history"} <= state.keys()
    other.load_state_dict(state)
    for each in (module, other):
        train(each, 5.0, 0.25)
    for name, value in module.state_dict().items():
        assert_bitwise(other.state_dict()[name], value, name)


@pytest.mark.parametrize("replaced", ["scale", "amax_history"])
def test_buffers_may_be_replaced_between_steps(replaced: str) -> None:
    module, assigned = linear(), linear()
    for each in (module, assigned):
        train(each, 3.0, 0.5)
    state = {name: value.clone() for name, value in module.state_dict().items() if name.endswith(replaced)}
    assigned.load_state_dict(state, strict=False, assign=True)
    for each in (module, assigned):
        train(each, 5.0, 0.25)
    for name, value in module.state_dict().items():
        assert_bitwise(assigned.state_dict()[name], value, name)


@pytest.mark.parametrize("replaced", ["scale", "amax_history"])
def test_buffers_may_be_given_other_memory_between_steps(replaced: str) -> None:
    """As code does that parks a model in host memory and brings it back."""
    module, moved = linear(), linear()
    for each in (module, moved):
        train(each, 3.0, 0.5)
    buffer = getattr(moved.gemm.scaling, replaced)
    buffer.data = buffer.data.clone()
    for each in (module, moved):
        for size in (5.0, 2.0):
            train(each, size, 0.25)
    for name, value in module.state_dict().items():
        assert_bitwise(moved.state_dict()[name], value, name)


def test_nothing_is_prepared_without_a_recipe() -> None:
    with pytest.raises(ValueError, match="prepare needs a recipe, got None; pass one of te_dist.recipe"):
        te.prepare(te.Linear(16, 16), None)


def test_plain_modules_are_prepared_before_loading() -> None:
    state = linear().state_dict()
    plain = te.Linear(16, 32, bias=False)
    te.prepare(plain, RECIPE)
    plain.load_state_dict(state)
    assert_bitwise(plain.gemm.scaling.scale, torch.ones(2), "scale")


def test_histories_without_a_place_are_not_left_out_in_silence() -> None:
    state = linear().state_dict()
    plain = te.Linear(16, 32, bias=False)
    with (
        pytest.warns(UserWarning, match="te_dist.prepare"),
        pytest.raises(RuntimeError, match=r'"gemm\.scaling\.scale"'),
    ):
        plain.load_state_dict(state)
    block = torch.nn.Sequential(te.Linear(16, 32, bias=False))
    with pytest.warns(UserWarning, match="te_dist.prepare"):
        found = block.load_state_dict({f"0.{key}": value for key, value in state.items()}, strict=False)
    assert sorted(found.unexpected_keys) == ["0.gemm.scaling.amax_history", "0.gemm.scaling.scale"]


def test_a_state_without_histories_leaves_them_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    state = copy.deepcopy(model.state_dict())
    te.convert(model, {"1": RECIPE})
    te.prepare(model, RECIPE)
    with te.autocast(recipe=RECIPE):
        model(torch.ones(16, 16)).sum().backward()
    before = copy.deepcopy(model[1].gemm.scaling.state_dict())
    model.load_state_dict(state)
    for name, value in before.items():
        assert_bitwise(model[1].gemm.scaling.state_dict()[name], value, name)
    with pytest.raises(
        RuntimeError, match=r'Missing key.*"1\.gemm\.scaling\.amax_history"'
    ):  # half of one is no such state
        model.load_state_dict(state | {"1.gemm.scaling.scale": before["scale"]})


def test_conversions_leave_scales_in_fp32() -> None:
    module = linear()
    train(module, 3.0, 0.3)
    before = copy.deepcopy(module.gemm.scaling.state_dict())
    module.bfloat16()
    assert module.weight.dtype == torch.bfloat16
    for name, value in before.items():
        assert_bitwise(module.gemm.scaling.state_dict()[name], value, name)


def test_state_on_meta_is_materialized() -> None:
    with te.quantized_model_init(recipe=RECIPE), torch.device("meta"):
        module = te.Linear(16, 32)
    assert module.gemm.scaling.scale.is_meta
    fsdp2.materialize(module, device="cpu", seed=0)
    assert_bitwise(module.gemm.scaling.scale, torch.ones(2), "scale")
    assert_bitwise(module.gemm.scaling.amax_history, torch.zeros(3, 2), "history")
    train_with_bias = torch.ones(4, 16)
    with te.autocast(recipe=RECIPE):
        module(train_with_bias).sum().backward()


@pytest.mark.parametrize("assigns", [False, True])
def test_a_model_from_the_meta_device_goes_on_where_a_checkpoint_ends(assigns: bool) -> None:
    module = linear()
    train(module, 3.0, 0.5)
    with torch.device("meta"):
        other = linear()
    if not assigns:
        other.to_empty(device="cpu")
    other.load_state_dict(copy.deepcopy(module.state_dict()), assign=assigns)
    for each in (module, other):
        train(each, 5.0, 0.25)
    for name, value in module.state_dict().items():
        assert_bitwise(other.state_dict()[name], value, name)


def test_a_pass_that_backward_never_comes_by_moves_nothing() -> None:
    module, beside = linear(), linear()
    with te.autocast(recipe=RECIPE):
        beside(torch.ones(4, 16, requires_grad=True))
    train(module, 2.0, 0.5)
    assert_bitwise(module.gemm.scaling.amax_history[-1], torch.tensor([2.0, 0.5]), "history")
    assert_bitwise(beside.gemm.scaling.amax_history, torch.zeros(3, 2), "history beside")
    train(beside, 0.5, 0.25)
    assert_bitwise(beside.gemm.scaling.amax_history[-1], torch.tensor([1.0, 0.25]), "with that of the pass before")


def test_another_history_length_is_refused() -> None:
    module = linear()
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=5)), pytest.raises(ValueError, match="start anew"):
        module(torch.ones(4, 16))


def test_a_failed_backward_does_not_keep_histories_from_moving() -> None:
    module = linear()
    with te.autocast(recipe=RECIPE):
        out = module(torch.ones(4, 16))
    out.register_hook(lambda grad: (_ for _ in ()).throw(RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        out.sum().backward()
    train(module, 2.0, 0.5)
    assert_bitwise(module.gemm.scaling.amax_history[-1], torch.tensor([2.0, 0.5]), "history")


@pytest.mark.parametrize(
    "wrong", [{"amax_history_len": 0}, {"amax_compute_algo": "mean"}, {"fp8": "e3m4"}], ids=lambda w: next(iter(w))
)
def test_requests_are_validated(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DelayedScalingRequest(**wrong)


@pytest.mark.parametrize("load", ["state dict", "checkpoint"])
def test_what_is_loaded_knows_nothing_of_a_step_that_is_under_way(tmp_path: Path, load: str) -> None:
    broken, fresh = linear(), linear()
    train(broken, 3.0, 5.0)
    checkpoints.save(tmp_path / "step_1", model=broken)
    kept = copy.deepcopy(broken.state_dict())
    with te.autocast(recipe=RECIPE):
        broken(torch.full((4, 16), 1e8))  # its loss is thrown away
    for module in (broken, fresh):
        if load == "checkpoint":
            checkpoints.load(tmp_path / "step_1", model=module)
        else:
            module.load_state_dict(kept)
        train(module, 2.0, 4.0)
    for (name, got), (_, want) in zip(broken.named_buffers(), fresh.named_buffers(), strict=True):
        assert_bitwise(got, want, name)


NESTINGS = list(product((None, False, True), repeat=2))  # use_reentrant of the outer region and of the inner one


@pytest.mark.parametrize(("outer", "inner"), NESTINGS, ids=str)
def test_scales_hold_for_a_step_of_nested_regions(outer: bool | None, inner: bool | None) -> None:
    """Of a map that two of them share: the first to be run again must not see scales of the step after."""

    def step(module: te.Linear, ways: tuple[bool | None, bool | None]) -> list[Tensor]:
        x = (torch.arange(16 * 16) % 7 / 8 - 0.25).view(16, 16).requires_grad_()
        for _ in range(2):
            x.grad = None
            with te.autocast(recipe=RECIPE):
                out = x
                for scale in (1.0, 64.0):
                    out = within(ways[0], lambda y: within(ways[1], lambda z: torch.tanh(module(z)), y), out * scale)
            out.sum().backward()
        return [x.grad, *module.buffers()]

    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(te.Linear(16, 16, bias=False))
    wanted = step(modules[0], (None, None))
    for got, want in zip(step(modules[1], (outer, inner)), wanted, strict=True):
        assert_bitwise(got, want, "gradient, scales and history")


def within(reentrant: bool | None, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, recomputed in backward unless `reentrant` is None."""
    return function(x) if reentrant is None else te.checkpoint(function, x, use_reentrant=reentrant)


def test_a_failed_backward_pass_is_no_part_of_another_models_step() -> None:
    failed, other = linear(), linear()
    failing = Failing.apply(torch.ones(4, 16, requires_grad=True))
    with te.autocast(recipe=RECIPE):
        out = failed(failing)
    with pytest.raises(RuntimeError, match="as asked"):
        out.sum().backward()
    train(other, 3.0, 5.0)
    assert not failed.gemm.scaling.amax_history.any()
    train(failed, 2.0, 4.0)
    assert failed.gemm.scaling.amax_history[-1].tolist() == [2.0, 4.0]


def test_a_hook_that_runs_a_backward_pass_moves_its_own_maps_alone() -> None:
    hooked, behind, before = linear(), linear(), linear()
    grads = []
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            probe = hooked(torch.full((4, 16), 2.0, requires_grad=True)).sum()
            inner = behind(torch.full((4, 16), 3.0, requires_grad=True))[:, :16]
            inner.register_hook(lambda grad, probe=probe: (probe.backward(), None)[1])
            out = before(inner)
        out.sum().backward()
        grads.append(float(inner.detach().abs().max()))
    for module, largest in ((hooked, 2.0), (behind, 3.0), (before, grads[-1])):
        assert float(module.gemm.scaling.amax_history[-1, 0]) == pytest.approx(largest)


class Inner(torch.autograd.Function):
    """Runs a graph of its own in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: te.Linear) -> Tensor:
        with torch.enable_grad():
            ctx.out = module(x.detach().requires_grad_())
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.autograd.backward(ctx.out, grad)
        return grad[:, :16], None


@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_backward_pass_keeps_no_later_one_from_moving_histories(fails: bool) -> None:
    failed, module = linear(), linear()
    if fails:
        with te.autocast(recipe=RECIPE):
            out = failed(Failing.apply(torch.ones(4, 16, requires_grad=True)))
        with pytest.raises(RuntimeError, match="as asked"):
            out.sum().backward()
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            out = Inner.apply(torch.full((4, 16), 2.0, requires_grad=True), module)
        out.sum().backward()
    assert module.gemm.scaling.amax_history[-1].tolist() == [2.0, 1.0]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("as asked")


@pytest.mark.parametrize("group", ["default", -100], ids=str)
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match=r"amax_reduction_group: got .*, wanted a process group that this rank is in"):
        te.autocast(recipe=RECIPE, amax_reduction_group=group)
