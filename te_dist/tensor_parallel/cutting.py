"""Cutting the parameters of a linear map over a mesh, and the operands that meet them."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from te_dist._torch_private import process_group
from te_dist.formats import Span
from te_dist.tensor import QuantizedTensor
from te_dist.tensor_parallel.cuts import spans
from te_dist.tensor_parallel.spread import GatheredQuantizer, PlacedQuantizer


def cut_parameter(param: nn.Parameter, mesh: DeviceMesh, *, dim: int, name: str) -> nn.Parameter:
    """A DTensor of `param`, which every rank has whole, cut along `dim`: bytes and scales are those of the whole.

    Raises:
        ValueError: it is a DTensor already, or a cut would go through a stored byte; alike on all ranks.
    """
    if isinstance(param, DTensor):
        raise ValueError(
            f"{name} is cut already, as {param.placements}: apply tensor parallelism once, and before fully_shard"
        )
    if not isinstance(param, QuantizedTensor):
        cut = distribute_tensor(param.data, mesh, [Shard(dim)], src_data_rank=None)
        return nn.Parameter(cut, requires_grad=param.requires_grad)
    parts = spans(param.shape[dim], mesh.size())
    alignment = param.format.alignment(dim)
    bad = next((part for part in parts if part.start % alignment or part.stop % alignment), None)
    if bad is not None:
        what = ("rows", "columns")[dim]
        raise ValueError(
            f"{name}: {param.shape[dim]} {what} over {mesh.size()} ranks are cut at {bad.start} and {bad.stop}, inside "
            f"a stored byte; this format can be cut at multiples of {alignment} {what}: change their number or that of "
            "ranks"
        )
    own = parts[mesh.get_local_rank()]
    shape = tuple(len(own) if d == dim else extent for d, extent in enumerate(param.shape))
    local = param.like(param.storage.narrow(dim, own.start, len(own)), shape)
    cut = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=param.shape, stride=param.stride())
    return nn.Parameter(cut, requires_grad=param.requires_grad)


@dataclass(frozen=True)
class Placement:
    """Of what each rank has of a map; copies of modules share it.

    Attributes:
        parts: outputs or inputs of each rank.
        group: the ranks.
    """

    parts: tuple[Span, ...]
    group: dist.ProcessGroup

    @property
    def text(self) -> str:
        """By which graphs know it; see `placement_named`."""
        lengths = tuple(len(part) for part in self.parts)
        return repr((type(self).__name__, lengths, self.group.group_name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # NOTE: a group cannot be copied.


@dataclass(frozen=True)
class ColumnPlacement(Placement):
    """Quantizers of a map of which each rank has some outputs: rows of the weight, columns of the gradient."""

    def __call__(self, role: str, quantizer: Any) -> Any:
        """The quantizer of this rank's part of the operand of this role."""
        dims = {"weight": 0, "grad_output": 1}
        return PlacedQuantizer(quantizer, dims[role], self.parts, group=self.group) if role in dims else quantizer


@dataclass(frozen=True)
class RowPlacement(Placement):
    """Quantizers of a map of which each rank has some inputs: columns of the weight and of the input."""

    def __call__(self, role: str, quantizer: Any) -> Any:
        """The quantizer of this rank's part of the operand of this role."""
        if role == "grad_output":
            return GatheredQuantizer(quantizer)
        return PlacedQuantizer(quantizer, 1, self.parts, group=self.group)


def placement_named(text: str) -> ColumnPlacement | RowPlacement:
    """The placement of this text, over the group that has its name now."""
    name, lengths, group = literal_eval(text)
    starts = accumulate(lengths, initial=0)
    parts = tuple(Span(start, length) for start, length in zip(starts, lengths, strict=False))
    return {each.__name__: each for each in (ColumnPlacement, RowPlacement)}[name](parts, process_group(group))
