"""What GroupedLinear keeps between calls, or is told of: quantized weights, gradients to come, sizes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import te_dist as te
from te_dist import optim, recipe
from te_dist.nn import GroupTable, group_table, grouped_linear
from te_dist.testing import assert_bitwise, mesh, pool

GROUPS, IN, OUT, SIZES = 3, 128, 128, [5, 0, 11]
RECIPE = recipe.Float8BlockScaling()
GPU = torch.device("cuda")  # named, not used


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(**options: Any) -> te.GroupedLinear:
    torch.manual_seed(0)
    return te.GroupedLinear(GROUPS, IN, OUT, bias=False, **options)


def call(module: te.GroupedLinear, is_first: bool | None = None) -> Tensor:
    with te.autocast(recipe=RECIPE):
        return module(normal(sum(SIZES), IN), SIZES, is_first)


def step(module: te.GroupedLinear, optimizer: torch.optim.Optimizer, is_first: bool | None = None) -> None:
    call(module, is_first).backward(normal(sum(SIZES), OUT, seed=2))
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("single", [False, True])
def test_a_step_of_the_optimizer_makes_kept_weights_stale(single: bool, dtype: torch.dtype) -> None:
    module = make(single_grouped_weight=single, params_dtype=dtype)
    step(module, optim.FusedAdam(module.parameters(), lr=0.1), True)
    with pytest.raises(RuntimeError, match="have changed since"):
        call(module, False)


def test_autograd_sees_that_the_optimizer_wrote() -> None:
    weight, x = torch.nn.Parameter(normal(4, 4)), normal(4, 4).requires_grad_()
    out = x @ weight
    weight.grad = torch.ones_like(weight)
    optim.FusedAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("how", ["optimizer", "load", "multiply"])
@pytest.mark.parametrize("single", [False, True])
def test_backward_never_reads_quantized_weights_that_were_written_since(single: bool, how: str) -> None:
    with te.quantized_model_init(recipe=RECIPE):
        module = make(single_grouped_weight=single)
    optimizer = optim.FusedAdam(module.parameters(), lr=0.1)
    step(module, optimizer)
    x = normal(sum(SIZES), IN)
    with te.autocast(recipe=RECIPE):
        out, frozen = module(x.clone().requires_grad_(), SIZES), module(x, SIZES)
    if how == "optimizer":
        optimizer.step()
    elif how == "load":
        module.load_state_dict(module.state_dict())
    else:
        with torch.no_grad():
            list(module.parameters())[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    frozen.sum().backward()  # its input wants no gradient, so that weights are not read


def test_the_optimizer_tells_of_quantized_weights() -> None:
    with te.quantized_model_init(recipe=RECIPE):
        module = te.Linear(IN, OUT)
    optimizer = optim.FusedAdam(module.parameters())
    with te.autocast(recipe=RECIPE):
        first, second = (module(normal(16, IN).requires_grad_()) for _ in range(2))
    first.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_nothing(how: Any) -> None:
    module = make()
    want, size = call(module, True), len(pickle.dumps(make()))
    assert len(pickle.dumps(module)) == size
    other = how(module)
    with pytest.raises(RuntimeError, match="there was none"):
        call(other, False)
    assert_bitwise(call(module, False), want, "y")


def test_other_weights_of_the_same_version_are_not_those_kept() -> None:
    module = make()
    call(module, True)
    module.weight1.data = normal(OUT, IN, seed=5)
    with pytest.raises(RuntimeError, match="have changed since"):
        call(module, False)
    call(module, True)
    version = module.weight1._version
    module.weight1 = torch.nn.Parameter(normal(OUT, IN, seed=6))
    while module.weight1._version < version:
        torch.autograd.graph.increment_version(module.weight1)
    with pytest.raises(RuntimeError, match="have changed since"):
        call(module, False)


def keep_parts(rank: int, world: int) -> None:
    module = te.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=True)
    whole = normal(world * GROUPS, OUT, IN)
    module.weight = torch.nn.Parameter(distribute_tensor(whole, mesh((world,), ("ep",)), [Shard(0)]))
    optimizer = optim.FusedAdam(module.parameters(), lr=0.1)
    for _ in range(2):
        assert_bitwise(call(module, True), call(module, False), "y")
        step(module, optimizer, False)
        with pytest.raises(RuntimeError, match="have changed since"):
            call(module, False)


def test_local_parts_of_dtensors_are_kept() -> None:
    pool(2).run(keep_parts)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("delays", [False, True])
def test_frozen_weights_have_no_gradients(delays: bool, fuses: bool) -> None:
    module = make(delay_wgrad_compute=delays, fuse_wgrad_accumulation=fuses)
    twin = make()
    for each in (module, twin):
        each.weight1.requires_grad_(False)
    for name in ("weight0", "weight2"):
        getattr(module, name).main_grad = torch.zeros(OUT, IN)
    for each in (module, twin):
        call(each).backward(normal(sum(SIZES), OUT, seed=2))
    module.backward_dw()
    assert module.weight1.grad is None and twin.weight1.grad is None
    for name in ("weight0", "weight2"):
        weight = getattr(module, name)
        assert_bitwise(weight.main_grad if fuses else weight.grad, getattr(twin, name).grad, name)


def test_sizes_on_the_host_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"m_splits=\[5, 0, 11\] is on the host, .* pass a tensor on the device"):
        grouped_linear._on_device(SIZES, GPU)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (group_table(torch.tensor([16, 0, 16]), 32), "3 groups in 32 rows on cpu; wanted 3 groups in the 16 rows"),
        (group_table(torch.tensor([8, 8]), 16), "2 groups in 16 rows on cpu; wanted 3 groups"),
        (GroupTable(torch.empty((4, 4), dtype=torch.int32, device="meta"), 16), "on meta; wanted .* on cpu"),
        (group_table(torch.tensor([16, 0, 16]), 32).tensor, r"shape \(3,\), got torch.int32 of \(4, 4\)"),
    ],
)
def test_tables_of_other_rows_are_refused(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(normal(16, IN), table)
