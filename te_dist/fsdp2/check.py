"""Whether weights that were made quantized still are, and units have all that is trained: nothing goes in silence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from te_dist import _torch_private
from te_dist.formats import Format
from te_dist.fsdp2.footprint import parameters_between_steps
from te_dist.fsdp2.parameter import ShardedParameter
from te_dist.kernels.runtime import is_recording
from te_dist.tensor import QuantizedTensor, placement

# Where compilers trace hooks, `check_first_passes` has the first that they come upon.
_OUTSIDE = (
    "FSDP2 gathers the parameters of a unit in hooks, outside of graphs; torch from 2.14 on traces hooks where the "
    "forward pass is torch's own, as that of nn.Sequential is. Compile units of a class with a forward pass of its "
    "own, or leave out fullgraph=True"
)
_PASSES = 2  # forward passes of a unit that are preceded by a check: the first one, and that after the first step


def check(model: nn.Module) -> None:
    """Raises where a weight that a module of te_dist was given quantized is no longer so; warns of trained parameters
    that no unit has, where others do, and of those that lie over fewer ranks than a unit around them.

    For the weights, `fsdp2.fully_shard` looks at what it wraps too: then, and before the first two forward passes,
    after materializing or loading and after the first step of an optimizer. Later passes cost nothing.

    Args:
        model: all of it; what lies around a unit cannot be seen from there.

    Raises:
        RuntimeError: names every such weight, and what it is now.
    """
    check_quantized(model)
    warn_of_others(model, stacklevel=3)
    warn_of_fewer_ranks(model, stacklevel=3)


def check_quantized(model: nn.Module) -> None:
    """The part of `check` that raises, for what is or will be a unit."""
    found = [f"{name}: {problem}" for name, problem in _problems(model)]
    if found:
        raise RuntimeError(
            f"weights that were made quantized are not any more: {'; '.join(found)}. Load values by load_state_dict or "
            "quantize them (te_dist.tensor.quantize) into a fsdp2.QuantizedParameter; where another weight is meant, "
            "take its name out of the module's quantized_weights"
        )


def warn_of_others(model: nn.Module, *, stacklevel: int) -> None:
    """Where parts of a model are sharded and others were forgotten, as embeddings around the blocks.

    `stacklevel`: as of `warnings.warn`, counted from here.
    """
    covered = {id(param) for unit in model.modules() if isinstance(unit, FSDPModule) for param in unit.parameters()}
    names = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in covered and not isinstance(param, DTensor)
    ]
    if covered and names:
        warnings.warn(
            f"{len(names)} parameters belong to no unit of FSDP2 ({_first(names)}): nothing sums their gradients "
            "over ranks, which would train them apart; call fully_shard(model) for the model around its units too",
            stacklevel=stacklevel,
        )


def warn_of_fewer_ranks(model: nn.Module, *, stacklevel: int) -> None:
    """Where a unit has fewer ranks than one around it, as experts over `edp` that nobody has spread over `ep`.

    `stacklevel`: as of `warnings.warn`, counted from here.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    ranks = {name: _torch_private.ranks_of_unit(unit) for unit, name in names.items() if isinstance(unit, FSDPModule)}
    found: dict[tuple[int, int], list[str]] = {}
    for name, param in parameters_between_steps(model, names):
        if not isinstance(param, DTensor) or not param.requires_grad:
            continue
        own = set(param.device_mesh.mesh.flatten().tolist())
        path = name.split(".")[:-1]
        around = set().union(*(ranks.get(".".join(path[:length]), ()) for length in range(len(path) + 1)))
        if not around <= own:
            found.setdefault((len(own), len(around)), []).append(name)
    for (few, many), apart in found.items():
        warnings.warn(
            f"{len(apart)} parameters lie over {few} of {many} ranks of a unit around them ({_first(apart)}): nothing "
            "sums their gradients over the others, which would train them apart; apply ExpertParallel before "
            "fully_shard, or wrap them over the mesh of the module around. (Experts of a rank's own tell so "
            "by being DTensors, Shard(0) over the ranks that share them.)",
            stacklevel=stacklevel,
        )


def check_first_passes(unit: nn.Module) -> None:
    """Has `check_quantized` called before the first passes of `unit`, and parameters looked at for values."""
    left = [_PASSES]

    @torch.compiler.disable(reason=_OUTSIDE)
    def before(module: nn.Module, args: Any) -> None:
        if not is_recording():
            _check_values(module)
        check_quantized(module)
        left[0] -= 1
        if not left[0]:
            handle.remove()

    handle = unit.register_forward_pre_hook(before, prepend=True)  # before anything is gathered


def _check_values(unit: nn.Module) -> None:
    """Raises RuntimeError where parameters are on the meta device, of which torch names some and says `to_empty`."""
    names = [name for name, param in unit.named_parameters() if param.is_meta]
    if names:
        raise RuntimeError(
            f"{len(names)} parameters are on the meta device and have no values ({_first(names)}); call "
            "te_dist.fsdp2.materialize(model, device=..., seed=...) before the first pass, which initializes them "
            "alike for every number of ranks"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if names[4:] else "")


@torch.compiler.disable(reason="a weight that was made quantized is plain; whether FSDP2 gathered it so is looked up")
def check_gathered(weight: torch.Tensor) -> None:
    """Raises RuntimeError where FSDP2 gathered this plain tensor as a weight that a module was given quantized.

    Torch's own `fully_shard` cuts a quantized matrix along another dimension than the first as it cuts plain tensors.
    """
    place = _torch_private.gathered_place(weight)
    if place is None:
        return
    module, name, dim = place
    format = getattr(module, "quantized_weights", {}).get(name)
    if format is not None:
        raise RuntimeError(
            f"{getattr(module, 'name', '') or type(module).__name__}.{name}: made quantized, it is gathered as plain "
            f"{weight.dtype}, of shards along dimension {dim}; wanted shards of quantized rows: have "
            "shard_placement_fn return Shard(0) or None for it. Where a plain weight is meant, take its name out of "
            "the module's quantized_weights"
        )


def not_gathered(label: str, weight: DTensor) -> RuntimeError:
    """The error of a module that is run on a shard: on some rows of the weight, whose gradients nobody reduces."""
    return RuntimeError(
        f"{label}: the weight of {tuple(weight.shape)} is a shard, {weight.placements}. FSDP2 gathers it for the "
        "forward pass of the unit that it is in; call the unit, or name the method that you call by "
        "torch.distributed.fsdp.register_fsdp_forward_method, or make this module a unit of its own (fully_shard). "
        "Where tensor parallelism is meant, use the styles of te_dist.tensor_parallel"
    )


def local_part(label: str, param: DTensor, *, is_cut: bool = False) -> torch.Tensor:
    """What this rank has of a parameter beside plain inputs: all of it, or what tensor parallelism left it (`is_cut`).

    Raises:
        RuntimeError: it has less, or nobody sums the gradient; alike on all ranks.
    """
    cuts = len(placement.cuts(param.placements))
    if cuts > is_cut and not param.is_meta:  # on the meta device kernels are rehearsed, on shards
        raise not_gathered(label, param)
    if not cuts:
        check_summed(label, param)
    return param.to_local()


def check_summed(label: str, param: DTensor) -> None:
    """Raises RuntimeError where plain inputs train a parameter that every rank has whole and FSDP2 did not gather."""
    trains = param.requires_grad and torch.is_grad_enabled() and not param.is_meta
    if not trains or torch.compiler.is_compiling() or getattr(param, "is_summed", False):
        return
    if _torch_private.sharded_of(param) is not None:
        # NOTE: to find it among all parameters takes time, and FSDP2 keeps this tensor.
        vars(param)["is_summed"] = True
        return
    raise RuntimeError(
        f"{label}: got a parameter of {tuple(param.shape)} that is a DTensor, {param.placements}, which no parallel "
        "style of te_dist cut: nothing would sum its gradient over ranks, which may have other inputs. Wanted a plain "
        "one: leave the module out of distribute_module and of torch's styles, and take fsdp2.fully_shard, or "
        "te_dist.tensor_parallel.SequenceParallel where each rank has a part of the sequence"
    )


def _problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name of a weight, what is wrong with it)."""
    for prefix, module in model.named_modules():
        expected: dict[str, Format] = getattr(module, "quantized_weights", {})
        for name, format in expected.items():
            local = placement.local_tensor(getattr(module, name, None))
            problem = None if local is None else _problem(local, format)
            if problem:
                yield f"{prefix}.{name}" if prefix else name, problem


def _problem(local: torch.Tensor, format: Format) -> str | None:
    if not isinstance(local, QuantizedTensor):
        return f"plain {local.dtype}"
    if local.format != format:
        return "of another format"
    if not isinstance(local, ShardedParameter):
        return f"a {type(local).__name__}, without the hooks by which FSDP2 gathers it"
    return None
