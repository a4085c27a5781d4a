"""`fully_shard` with what torch's own cannot know: checks before the first collective, and what each pass needs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from te_dist import _torch_private
from te_dist.fsdp2.ahead import Shards, prepare_kernels
from te_dist.fsdp2.check import check_first_passes, check_quantized, warn_of_fewer_ranks
from te_dist.fsdp2.divide import note_divided
from te_dist.fsdp2.footprint import dotted, outside_of_units, parameters_between_steps
from te_dist.fsdp2.loading import watch
from te_dist.fsdp2.one_rank import check_left, left_alone, note_left
from te_dist.fsdp2.own_chunk import OwnChunk
from te_dist.fsdp2.parameter import GroupedParameter, ShardedParameter, Wrap
from te_dist.grouped import GroupCut
from te_dist.scaling.agreement import settle_parts
from te_dist.tensor import Cut, QuantizedTensor, placement
from te_dist.tensor.exchanged import exchange_of, note_exchanged
from te_dist.tensor.placement import local_tensor

_BY = "fully_shard"  # what exchanges parameters for shards


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    recompute: bool = False,
    **kwargs: Any,
) -> FSDPModule:
    """torch's `fully_shard`; quantized parameters are gathered in their format, with the fewest bytes each pass needs.

    On GPUs it compiles first what the module launches, so that no rank waits in a collective for another's compiler.

    Over one rank, parameters that another parallelism has cut stay as they are (see [Note: Units of one rank]).

    Args:
        module: as in torch, or a list of modules that make one unit; parameters that an inner `fully_shard` took are
            left to it.
        mesh: 1-D mesh to shard over, or 2-D (replicate, shard); with torch's `dp_mesh_dims` (torch 2.12 and later) the
            mesh of all parallelisms, of which the names given there count. None: of all ranks, as in torch.
        reshard_after_forward: as in torch: free parameters between forward and backward. None: yes, but not at the
            root. An integer is refused: torch cannot reshard to a smaller mesh what has a gather of its own.
        recompute: whether backward runs this module's forward again (activation checkpointing); then both directions
            of a format whose directions are independent are gathered in backward.
        **kwargs: further arguments of torch's `fully_shard`. `shard_placement_fn` may return `Shard(1)` for groups of
            matrices (`GroupedParameter`), whose rows are cut then instead of their members, and a mesh for the experts.

    Raises:
        RuntimeError: a weight that was made quantized is not any more, see `check`; or there is neither a mesh nor a
            process group.
        ValueError: a parameter cannot be cut over this mesh, has other parts on ranks of it or is tied to one of
            another unit, a module keeps gradients from autograd, or trained parameters of one unit differ in dtype; on
            every rank alike, before any collective.
        CompilerError: a kernel has to be compiled and there is no compiler.
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: FSDP2 cannot reshard quantized parameters to a smaller "
            "mesh; pass True, False or None"
        )
    mesh = _mesh(mesh)
    modules = module if isinstance(module, list) else [module]
    ignored = {id(param) for param in kwargs.get("ignored_params") or ()}
    for each in modules:
        check_quantized(each)
    _check_autograd(modules, ignored)
    # Of which module is said now: torch puts a class of its own in the place of each.
    owned = [(n, p, type(each).__name__) for each in modules for n, p in _own(each) if id(p) not in ignored]
    given = [(n, p) for n, p, _ in owned]
    _check_ties(given)
    _check_untaken(given)
    placed = kwargs.get("shard_placement_fn") or (lambda param: None)
    results = {id(param): placed(param) for _, param in given}
    left = left_alone((param for _, param in given if results[id(param)] is None), mesh, kwargs)
    check_left(given, modules, left)
    if kwargs.get("dp_mesh_dims") is None:
        _check_meshes(given, mesh, results)
    _check_dtypes(given, mesh, results)
    taken = [(n, p) for n, p in given if isinstance(local_tensor(p), ShardedParameter)]
    shards = Shards.over(mesh, kwargs.get("dp_mesh_dims"))
    shards_of: dict[int, Shards] = {}
    for name, param in taken:
        placement, parts = _placed(results[id(param)], shards)
        _check_cuts(name, param, parts, _sharded_dim(name, param, placement))
        shards_of[id(local_tensor(param))] = parts
    if mesh.device_type == "cuda":
        policy = kwargs.get("mp_policy")
        for each in modules:
            prepare_kernels(each, shards=shards, dtype=None if policy is None else policy.param_dtype)
    if left:
        kwargs["ignored_params"] = {*(kwargs.get("ignored_params") or ()), *left}
        ignored |= {id(param) for param in left}
    with OwnChunk(shards_of):
        torch_fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, **kwargs)
    note_left(left, modules)
    note_divided(modules)
    for name, param, unit in owned:
        if id(param) not in ignored:
            note_exchanged(param, f"{name} of {unit}", _BY)
    _watch(modules, Wrap(weakref.ref(modules[0]), recompute), ignored)
    for each in modules:
        warn_of_fewer_ranks(each, stacklevel=3)
    return module  # type: ignore[return-value]


def _watch(modules: list[nn.Module], wrap: Wrap, ignored: Set[int]) -> None:
    """Tells parameters of a unit, all but those `ignored`, how they were wrapped, and has its first passes checked."""
    for each in modules:
        for _, param in _own_quantized(each):
            if id(param) not in ignored:
                local_tensor(param).wrap = replace(wrap)
        for owner in _owners(each):
            watch(owner)
        check_first_passes(each)
    _torch_private.gather_end_to_end(modules[0], GroupedParameter)


def settle(model: nn.Module) -> None:
    """Makes all ranks agree on the scales of shards that high-precision values were written into since the last time.

    Loading, initializing or averaging weights writes shards one rank at a time. The next gather would settle each of
    them on its own; this does it for the whole model in one reduction per process group. Collective.
    """
    waiting: dict[Any, list[DTensor]] = {}
    names = {module: name for name, module in model.named_modules()}
    for _, param in parameters_between_steps(model, names):
        local = local_tensor(param)
        if isinstance(param, DTensor) and isinstance(local, QuantizedTensor) and local.storage.unsettled is not None:
            waiting.setdefault(placement.group_key(param), []).append(param)
    for params in waiting.values():
        storages = [local_tensor(param).storage for param in params]
        unsettled = [(s, s.unsettled, placement.partition(p)) for s, p in zip(storages, params, strict=True)]
        settle_parts(unsettled, placement.groups(params[0]))


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The one to shard over."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        raise TypeError(
            f"mesh={mesh!r}: wanted a DeviceMesh, such as torch.distributed.device_mesh.init_device_mesh(device_type, "
            "(num_ranks,)), or None for one of all ranks"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard without a mesh shards over all ranks, and there is no process group; start by torchrun and "
            "call torch.distributed.init_process_group() first, or pass a mesh"
        )
    device = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters that wrapping `module` takes: all but those of units inside it."""
    seen = set()
    for prefix, each in outside_of_units(module):
        for name, param in each.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                yield dotted(prefix, name), param


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that have those parameters themselves."""
    return (each for _, each in outside_of_units(module) if any(True for _ in each.parameters(recurse=False)))


def _own_quantized(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of them that are quantized."""
    return ((name, param) for name, param in _own(module) if isinstance(local_tensor(param), ShardedParameter))


def _check_ties(params: list[tuple[str, Any]]) -> None:
    """FSDP2 puts others in the place of the parameters of a unit, in its own modules only."""
    for name, param in params:
        exchange = exchange_of(param)
        if exchange is not None and exchange.by == _BY:
            raise ValueError(
                f"{name} is tied to {exchange.name}, a unit that was wrapped before: FSDP2 would shard and update "
                "each on its own; wrap the modules that share it as one unit (fully_shard([first, second]), or the "
                "module around both)"
            )


def _check_untaken(params: list[tuple[str, Any]]) -> None:
    """A unit takes what no other has: FSDP2 cannot shard its own shards."""
    taken = {id(getattr(module, name, None)) for module, name in _torch_private.all_managed()}
    for name, param in params:
        if id(param) in taken:
            raise ValueError(
                f"{name} is sharded by fully_shard already, of the same module or one around it, got it to shard once "
                "more, wanted what no unit has; call fully_shard once for each module: for the blocks first, then for "
                "the module around them"
            )


def _check_meshes(params: list[tuple[str, Any]], mesh: DeviceMesh, placed: dict[int, Any]) -> None:
    """What other parallelism has cut is sharded over ranks that hold the same part of it; for `placed` see below."""
    for name, param in params:
        info = getattr(placed[id(param)], "mesh_info", None)
        over = mesh if info is None else info.mesh
        if isinstance(param, DTensor) and torch.isin(over.mesh, param.device_mesh.mesh).sum() > 1:
            raise ValueError(
                f"{name} lies on {param.device_mesh} already, got {over} to shard over, wanted the ranks that have the "
                'same part of it: mesh["dp"] beside tensor parallelism. Experts over ranks are wrapped before the '
                'module around them, as fully_shard(block.experts, mesh=mesh["edp"])'
            )


def _check_dtypes(params: list[tuple[str, Any]], mesh: DeviceMesh, placed: dict[int, Any]) -> None:
    """The gradients of a unit are reduced in one buffer for each mesh, of one type.

    Args:
        mesh: of parameters that have none of their own.
        placed: by id of a parameter, what shard_placement_fn said of it.
    """
    meshes: dict[DeviceMesh, dict[torch.dtype, str]] = {}
    for name, param in params:
        if param.requires_grad:
            info = getattr(placed[id(param)], "mesh_info", None)
            meshes.setdefault(mesh if info is None else info.mesh, {}).setdefault(param.dtype, name)
    for first in meshes.values():
        if len(first) > 1:
            found = ", ".join(f"{dtype} ({name})" for dtype, name in first.items())
            raise ValueError(
                f"the trained parameters of one unit have one dtype in torch {torch.__version__}, got {found}; make "
                "them of one (params_dtype=...), or wrap the modules of each dtype as a unit of their own"
            )


def _check_autograd(modules: list[nn.Module], ignored: Set[int]) -> None:
    """FSDP2 reduces the gradients that autograd hands it."""
    for each in modules:
        for name, found in each.named_modules():
            option = getattr(found, "bypasses_autograd", None)
            if option and any(id(param) not in ignored for param in found.parameters(recurse=False)):
                raise ValueError(
                    f"{name or type(found).__name__}: {option} keeps gradients of weights from autograd, where FSDP2 "
                    "takes them to reduce; leave it out, or pass the parameters as ignored_params"
                )


def _placed(result: Any, shards: Shards) -> tuple[Any, Shards]:
    """(placement or None, shards) of what shard_placement_fn says of a parameter, which may bring a mesh of its own."""
    info = getattr(result, "mesh_info", None)
    return (result, shards) if info is None else (result.placement, Shards.along(info.mesh, info.shard_mesh_dim))


def _sharded_dim(name: str, param: Any, placement: Any) -> int:
    """The dimension that is cut; `placement`: what shard_placement_fn said of the parameter."""
    local = local_tensor(param)
    dim = 0 if placement is None else getattr(placement, "dim", None)
    if dim == 0 or (dim == 1 and isinstance(local, GroupedParameter)):
        return dim
    allowed = "Shard(0) or Shard(1)" if isinstance(local, GroupedParameter) else "Shard(0)"
    raise ValueError(
        f"{name}: shard_placement_fn gave {placement!r}, wanted {allowed}, or None: a quantized matrix is sharded by "
        "rows, a group of them by members or by rows"
    )


def _check_cuts(name: str, param: Any, shards: Shards, dim: int) -> None:
    local, num_shards = local_tensor(param), shards.count
    alignment = local.format.alignment(0)
    if isinstance(param, DTensor) and not all(map(len, placement.partition(param).rows)):
        raise ValueError(
            f"{name}: {param.shape[0]} rows over {param.device_mesh.size()} ranks of {param.device_mesh} leave some "
            "without any, whose part FSDP2 cannot cut again; cut it over fewer ranks, or not at all"
        )
    if local.storage.missing:
        raise ValueError(
            f"{name}: {local.storage.missing} were freed by update_usage, and are gathered in each pass; shard a "
            "weight that has both directions"
        )
    if isinstance(local, GroupedParameter):
        if dim and local.shape[dim] % num_shards:
            raise ValueError(
                f"{name}: {local.shape[dim]} rows of each member over {num_shards} ranks are not equally many on each, "
                "as FSDP2 wants it; change the number of rows or of ranks, or shard along members"
            )
        parts = (part.region for part in GroupCut(local.storage.uniform, dim, local.shape).parts(num_shards))
    elif local.dim() != 2:
        raise ValueError(
            f"{name} has shape {tuple(local.shape)} and is one quantized matrix of {local.storage.shape[0]} rows; "
            "matrices that are stacked, such as weights of experts, are a GroupedParameter: quantize them by "
            "te_dist.grouped.quantize"
        )
    else:
        parts = iter(Cut(local.storage.region, local.shape).parts(num_shards))
    starts = (part.rows.start for part in parts if len(part.rows))
    bad = next((start for start in starts if start % alignment), None) if alignment > 1 else None
    if bad is not None:
        rows = local.shape[local.storage.matrix_dim]
        raise ValueError(
            f"{name}: {rows} rows over {num_shards} ranks are cut at row {bad}, inside a stored byte; this "
            f"format can be cut at multiples of {alignment} rows: change the number of rows or of ranks"
        )
