"""Norms whose parameters are DTensors, as torch's own styles make them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import te_dist as te
from te_dist import fsdp2, tensor_parallel, testing
from te_dist.testing import assert_bitwise, full_tensor

WIDTH, SEQUENCE = 32, 7  # which no number of ranks divides
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "layer": (te.LayerNorm, nn.LayerNorm),
    "root mean square": (te.RMSNorm, nn.RMSNorm),
}


def made(cls: Any, *, zero_centered: bool = False) -> nn.Module:
    options = {"zero_centered_gamma": True} if zero_centered else {}
    norm = cls(WIDTH, eps=1e-5, device=testing.device(), **options)
    with torch.no_grad():
        for index, param in enumerate(norm.parameters()):
            param.copy_(torch.linspace(-1, 2, WIDTH) + index - zero_centered * (index == 0))
    return norm


def passed(norm: nn.Module, x: Tensor) -> dict[str, Any]:
    """Output and gradients of a pass."""
    x = x.detach().requires_grad_()
    out = norm(x)
    out.pow(3).sum().backward()
    return {"output": out, "input": x.grad} | {name: param.grad for name, param in norm.named_parameters()}


def compute(rank: int, world: int, kind: str, zero_centered: bool) -> None:
    mesh = testing.mesh((world,), ("tp",))
    ours, torchs = NORMS[kind]
    x = torch.randn(2, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(0)).to(testing.device())
    want = passed(made(ours, zero_centered=zero_centered), x)
    norm, model = made(ours, zero_centered=zero_centered), made(torchs)
    for each in (norm, model):
        parallelize_module(each, mesh, SequenceParallel())
    spread = DTensor.from_local(
        x.tensor_split(world, 1)[rank], mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride()
    )
    got, of_torch = passed(norm, spread), passed(model, spread)
    for name, value in got.items():
        assert value.placements == of_torch[name].placements, name
        torch.testing.assert_close(full_tensor(value), full_tensor(want[name]), msg=name)
        if not zero_centered:
            assert_bitwise(value.to_local(), of_torch[name].to_local(), name)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_of_dtensors_computes_what_torch_s_does(ranks, kind: str, zero_centered: bool) -> None:
    ranks(2).run(compute, kind, zero_centered)


def refuse(rank: int, world: int) -> None:
    """A plain input is refused; under the style of te_dist gradients are sums over ranks."""
    mesh = testing.mesh((world,), ("tp",))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(testing.device())
    for module in (made(te.LayerNorm), made(te.RMSNorm), te.LayerNormLinear(WIDTH, WIDTH, device=testing.device())):
        spread = distribute_module(module, mesh)
        with pytest.raises(RuntimeError, match=r"Norm.*: got a parameter of .* that is a DTensor.*nothing would sum"):
            spread(x)
        with torch.no_grad():
            spread(x)
    want = passed(made(te.RMSNorm), x)
    norm = distribute_module(made(te.RMSNorm), mesh)
    parallelize_module(norm, mesh, tensor_parallel.SequenceParallel())
    got = passed(norm, x.chunk(world)[rank])
    torch.testing.assert_close(full_tensor(got["weight"]), want["weight"])


def test_a_plain_input_beside_parameters_that_are_dtensors_is_refused(ranks) -> None:
    ranks(2).run(refuse)


def shard(rank: int, world: int) -> None:
    """FSDP2 over one dimension, torch's sequence parallelism over the other."""
    mesh = testing.mesh((2, 2), ("dp", "tp"))
    x = torch.randn(2, 2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).to(testing.device())
    want, norm = made(te.LayerNorm), made(te.LayerNorm)
    for each in x:
        want(each).pow(3).sum().div(2).backward()
    parallelize_module(norm, mesh["tp"], SequenceParallel())
    fsdp2.fully_shard(norm, mesh=mesh["dp"])
    own = x[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")]
    norm(own).to_local().pow(3).sum().backward()
    for name, param in norm.named_parameters():
        torch.testing.assert_close(full_tensor(param.grad), dict(want.named_parameters())[name].grad, msg=name)


def test_fsdp_gathers_norms_of_dtensors(ranks) -> None:
    ranks(4).run(shard)


def shard_by_names(rank: int, world: int) -> None:
    """What FSDP2 gathers of the mesh of all parallelisms is a DTensor on all ranks, whose gradients FSDP2 sums."""
    mesh = testing.mesh((world,), ("dp",))
    dims = fsdp.DataParallelMeshDims(shard="dp")
    x = torch.randn(world, 8, WIDTH, generator=torch.Generator().manual_seed(0)).to(testing.device())
    for make in (partial(made, te.LayerNorm), partial(te.LayerNormLinear, WIDTH, WIDTH, device=testing.device())):
        torch.manual_seed(0)
        want = make()
        got = distribute_module(copy.deepcopy(want), mesh)
        for each in x:
            want(each).pow(3).sum().div(world).backward()
        fsdp2.fully_shard(got, mesh=mesh, dp_mesh_dims=dims)
        got(x[rank]).pow(3).sum().backward()
        for name, param in got.named_parameters():
            torch.testing.assert_close(full_tensor(param.grad), dict(want.named_parameters())[name].grad, msg=name)


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch before 2.12 has no dp_mesh_dims")
def test_fsdp_gathers_norms_of_the_mesh_of_all_parallelisms(ranks) -> None:
    ranks(2).run(shard_by_names)
