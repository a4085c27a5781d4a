"""Layers cut over ranks on GPUs: what is recorded gives the bits of what is not, waits for nothing, is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from te_dist import testing
from te_dist.tensor.placement import local_tensor
from te_dist.testing import WorkerPool, assert_bitwise
from tests.distributed.test_tensor_parallel import BATCH, PLANS, RECIPES, SEQUENCE, K, autocast, make_layer, normal
from tests.gpu.graphs import warm_up
from tests.gpu.twins import unrecorded
from tests.gpu.waits import never_waiting

pytestmark = pytest.mark.gpu


def cut(name: str, plan: str, mesh: DeviceMesh) -> nn.Module:
    """The same layer every time."""
    layer = make_layer(RECIPES[name], quantized=True)
    return parallelize_module(layer, mesh, {key: style() for key, style in PLANS[plan].items()})


def part(plan: str, world: int, seed: int) -> Tensor:
    """What a rank has of the input."""
    return normal(BATCH, SEQUENCE // world if plan == "sequence" else SEQUENCE, K, seed=seed)


def passed(layer: nn.Module, name: str, x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Output and all gradients of a pass; the gradient of the output is the input reversed."""
    with autocast(RECIPES[name], mesh.get_group()):
        out = layer(x)
    out.backward(x.detach().flip(1))
    grads = [x.grad, *(param.grad for param in layer.parameters())]
    return [out.detach(), *map(local_tensor, grads)]


def recorded(rank: int, world: int, name: str, plan: str) -> None:
    mesh = testing.mesh((world,), ("tp",))
    layer, twin = (cut(name, plan, mesh) for _ in range(2))
    for seed, around in enumerate((nullcontext, nullcontext, nullcontext, never_waiting)):
        layer.zero_grad()
        twin.zero_grad()
        x, same = (part(plan, world, seed).requires_grad_() for _ in range(2))
        with around():
            got = passed(layer, name, x, mesh)
        with unrecorded():
            want = passed(twin, name, same, mesh)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_bitwise(a, b, f"{index} of pass {seed}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["current", "block", "mx", "nv"])
def test_what_is_recorded_gives_the_bits_of_what_is_not(
    name: str, plan: str, world: int, gpu_ranks: Callable[[int], WorkerPool]
) -> None:
    gpu_ranks(world).run(recorded, name, plan)


def captured(rank: int, world: int, name: str, plan: str) -> None:
    mesh = testing.mesh((world,), ("tp",))
    layer, eager = (cut(name, plan, mesh) for _ in range(2))
    graph, x = torch.cuda.CUDAGraph(), part(plan, world, 0).requires_grad_()
    warm_up(lambda: passed(layer, name, x, mesh))
    layer.zero_grad()
    x.grad = None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        got = passed(layer, name, x, mesh)
    for seed in (1, 2):
        eager.zero_grad()
        with torch.no_grad():
            x.copy_(part(plan, world, seed))
        graph.replay()
        want = passed(eager, name, x.detach().clone().requires_grad_(), mesh)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_bitwise(a, b, f"{index} of seed {seed}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["current", "block"])
def test_a_captured_pass_replays_with_other_inputs(
    name: str, plan: str, world: int, gpu_ranks: Callable[[int], WorkerPool]
) -> None:
    gpu_ranks(world).run(captured, name, plan)
