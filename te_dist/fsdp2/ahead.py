"""Kernels of a model, compiled when it is wrapped. See [Note: Kernels ahead of time]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from te_dist.formats import Direction, Region, geometry
from te_dist.formats.group import MEMBERS, ROWS
from te_dist.fsdp2.parameter import GroupedParameter, ShardedParameter
from te_dist.fsdp2.plan import KEPT, RECOMPUTED, RESHARDED, Phase, leading_and_region, plan_gather
from te_dist.grouped import GroupCut
from te_dist.kernels.runtime import prepare, recording
from te_dist.kernels.spec import Spec
from te_dist.tensor import Cut, QuantizedStorage, empty, find_amaxes
from te_dist.tensor.placement import local_tensor


@dataclass(frozen=True)
class Shards:
    """How many parts FSDP2 cuts a parameter into, and which of them this rank gets."""

    count: int
    index: int

    @staticmethod
    def over(mesh: DeviceMesh, dims: Any = None) -> Shards:
        """Of a mesh as `fully_shard` takes it: 1-D, or 2-D (replicate, shard).

        Args:
            dims: torch's `DataParallelMeshDims`, by which names count; several to shard over, the first outermost.
        """
        if dims is None:
            return Shards.along(mesh, mesh.ndim - 1)
        shards = Shards(1, 0)
        for name in dims.shard_names:
            one = Shards.along(mesh[name], 0)
            shards = Shards(shards.count * one.count, shards.index * one.count + one.index)
        return shards

    @staticmethod
    def along(mesh: DeviceMesh, dim: int | None) -> Shards:
        """Of one dimension of a mesh; one part where it is None."""
        return Shards(1, 0) if dim is None else Shards(mesh.size(dim), mesh.get_local_rank(dim))


def prepare_kernels(module: nn.Module, *, shards: Shards | None = None, dtype: torch.dtype | None = None) -> None:
    """Compiles and loads what `kernels_of` lists, on the current CUDA device.

    Raises:
        CompilerError: a kernel has to be compiled and there is no compiler.
        RuntimeError: there are no kernels for the device.
    """
    prepare(kernels_of(module, shards=shards, dtype=dtype), torch.cuda.current_device())


def kernels_of(
    module: nn.Module, *, shards: Shards | None = None, dtype: torch.dtype | None = None
) -> tuple[Spec, ...]:
    """What `module` launches on a GPU in training: passes of its modules, and quantization of its weights.

    Modules that have a method `rehearse(dtype)` take part. Those inside of FSDP2 units did when these were wrapped.

    Args:
        shards: into which `fully_shard` has yet to cut the weights; None for weights as they are.
        dtype: of activations, where it is not that of the parameters.
    """
    wrapped = {inner for unit in module.modules() if isinstance(unit, FSDPModule) for inner in unit.modules()}
    with recording() as specs, torch.no_grad():
        for each in module.modules():
            if each in wrapped:
                continue
            rehearse = getattr(each, "rehearse", None)
            if rehearse is not None:
                rehearse(dtype)
            for param in each.parameters(recurse=False):
                local = local_tensor(param)
                if isinstance(local, GroupedParameter):
                    _rehearse_group(local)
                elif isinstance(local, ShardedParameter):
                    _rehearse_weight(local, shards)
                if isinstance(local, ShardedParameter) and shards is not None:
                    _rehearse_gathers(local, shards.count)
    return tuple(dict.fromkeys(specs))


def _rehearse_group(weight: GroupedParameter) -> None:
    """Matrices are quantized to initialize them, and from masters, which are decoded; products turn all at once."""
    gathered = weight.storage.blank(weight.format, device="meta", fields=weight.format.canonical.fields)
    values = torch.empty(gathered.shape, dtype=weight.dtype, device="meta")
    for matrix, own in gathered.matrices(values)[:1]:
        matrix.quantize_(own)
        _rehearse_update(matrix)
    if weight.format.columnwise_is_derivable:
        gathered.derive(Direction.COLUMNWISE)


def _rehearse_weight(weight: ShardedParameter, shards: Shards | None) -> None:
    """The whole is quantized to initialize it, its shard by the optimizer, from masters that were decoded at first."""
    whole = _on_meta(weight.storage, weight.storage.region)
    whole.quantize_(torch.empty(whole.shape, dtype=weight.dtype, device="meta"))
    region = whole.region
    if shards is not None:
        region = Cut(region, weight.shape).parts(shards.count)[shards.index]
    _rehearse_update(_on_meta(weight.storage, region))


def _rehearse_gathers(weight: ShardedParameter, num_shards: int) -> None:
    """What was gathered is put together, in each phase, by each policy and cut that a unit may have."""
    if isinstance(weight, GroupedParameter):
        by_rows = weight.shape[ROWS] % (num_shards * weight.format.alignment(0)) == 0
        dims = (MEMBERS, ROWS) if by_rows else (MEMBERS,)
        cuts = [GroupCut(weight.storage.uniform, dim, weight.shape) for dim in dims]
    else:
        cuts = [Cut(weight.storage.region, weight.shape)]
    for cut, policy, phase in product(cuts, (KEPT, RESHARDED, RECOMPUTED), Phase):
        plan = plan_gather(weight.format, cut.parts(num_shards), policy=policy, phase=phase)
        outputs = [torch.empty(wire.nbytes * num_shards, dtype=torch.uint8, device="meta") for wire in plan.wires]
        leading, region = leading_and_region(plan.whole)
        for field in plan.owned(weight.format, len(outputs)):
            plan.assemble(outputs, field, geometry.empty(field, region, device="meta", leading=leading))


def _rehearse_update(part: QuantizedStorage) -> None:
    """Masters are decoded at first, and quantized in every step, by scales that ranks agree on where they share any."""
    masters: Tensor = part.dequantize(torch.float32)
    part.quantize_(masters)
    part.quantize_(masters, find_amaxes(masters, part.format, part.region))


def _on_meta(storage: QuantizedStorage, region: Region) -> QuantizedStorage:
    fields = storage.format.canonical.fields
    return empty(storage.format, region, dtype=storage.dtype, device="meta", fields=fields)
