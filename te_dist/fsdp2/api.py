"""`fully_shard` with what torch's own cannot know: checks before the first collective, and what each pass needs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from te_dist.fsdp2.ahead import prepare_kernels
from te_dist.fsdp2.parameter import QuantizedParameter, Wrap
from te_dist.scaling.agreement import quantize_parts
from te_dist.tensor import Cut, QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | None = None,
    recompute: bool = False,
    **kwargs: Any,
) -> FSDPModule:
    """torch's `fully_shard`; quantized parameters are gathered in their format, with the fewest bytes each pass needs.

    On GPUs it compiles first what the module launches, so that no rank waits in a collective for another's compiler.

    Args:
        module: as in torch, or a list of modules that make one unit; parameters that an inner `fully_shard` took are
            left to it.
        mesh: 1-D mesh to shard over, or 2-D (replicate, shard).
        reshard_after_forward: as in torch: free parameters between forward and backward. None: yes, but not at the
            root. An integer is refused: torch cannot reshard to a smaller mesh what has a gather of its own.
        recompute: whether backward runs this module's forward again (activation checkpointing); then both directions
            of a format whose directions are independent are gathered in backward.
        **kwargs: further arguments of torch's `fully_shard`.

    Raises:
        ValueError: a parameter cannot be cut over this mesh; on every rank alike, before any collective.
        CompilerError: a kernel has to be compiled and there is no compiler.
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: FSDP2 cannot reshard quantized parameters to a smaller "
            "mesh; pass True, False or None"
        )
    modules = module if isinstance(module, list) else [module]
    taken = [found for each in modules for found in _own_quantized(each)]
    if taken and kwargs.get("shard_placement_fn") is not None:
        raise ValueError("shard_placement_fn: quantized parameters are sharded by rows; leave it out for this module")
    for name, param in taken:
        _check_cuts(name, param, mesh)
    if mesh.device_type == "cuda":
        policy = kwargs.get("mp_policy")
        for each in modules:
            prepare_kernels(each, mesh=mesh, dtype=None if policy is None else policy.param_dtype)
    torch_fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, **kwargs)
    wrap = Wrap(weakref.ref(modules[0]), recompute)
    for each in modules:
        for _, param in _own_quantized(each):
            local_tensor(param).wrap = replace(wrap)
    return module  # type: ignore[return-value]


def settle(model: nn.Module) -> None:
    """Makes all ranks agree on the scales of shards that high-precision values were written into since the last time.

    Loading, initializing or averaging weights writes shards one rank at a time. The next gather would settle each of
    them on its own; this does it for the whole model in one reduction per process group. Collective.
    """
    waiting: dict[Any, list[DTensor]] = {}
    for param in model.parameters():
        local = local_tensor(param)
        if isinstance(param, DTensor) and isinstance(local, QuantizedTensor) and local.storage.unsettled is not None:
            waiting.setdefault(placement.group_key(param.device_mesh, param.placements), []).append(param)
    for params in waiting.values():
        storages = [local_tensor(p).storage for p in params]
        parts = [(s, s.unsettled, placement.partition(p)) for s, p in zip(storages, params, strict=True)]
        quantize_parts(parts, placement.groups(params[0]))


def _own_quantized(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Quantized parameters that wrapping `module` takes: all but those of units inside it."""
    inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    taken = {id(p) for unit in inner for p in unit.parameters()}
    for name, param in module.named_parameters():
        if id(param) not in taken and isinstance(local_tensor(param), QuantizedParameter):
            yield name, param


def _check_cuts(name: str, param: Any, mesh: DeviceMesh) -> None:
    local = local_tensor(param)
    num_shards = mesh.size(mesh.ndim - 1)
    alignment = local.format.alignment(0)
    parts = Cut(local.storage.region, local.shape).parts(num_shards)
    bad = next((p.rows.start for p in parts if p.rows.start % alignment and len(p.rows)), None)
    if bad is not None:
        raise ValueError(
            f"{name}: {local.shape[0]} rows over {num_shards} ranks are cut at row {bad}, inside a stored byte; this "
            f"format can be cut at multiples of {alignment} rows: change the number of rows or of ranks"
        )
