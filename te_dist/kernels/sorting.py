"""Launches of what sorts copies of rows. Arguments are those of the ops, in the order of their schemas."""

from __future__ import annotations

from torch import Tensor

from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once

CHUNK = 256  # copies that a warp sorts
MOST_EXPERTS = 8192
_WARPS = 4  # of a block, each of which can count for a part of the most experts; or one
_ROWS = 8  # of a block of threads
_STAY = -1  # the position of nobody's copies: where they sort
_COPIES = Layout(
    "experts:P copies:q first:q num_experts:q chunks:q before:P copies_each:q elsewhere:q "
    "index:P choices:P positions:P counts:P"
)
BEFORE = Spec("sort_copies.cuh", "CountBefore", _COPIES)


@once
def count(warps: int) -> Spec:
    """Spec of what counts the copies of chunks. `warps`: of a block."""
    return Spec("sort_copies.cuh", f"CountCopies<{warps}>", _COPIES)


@once
def place(warps: int) -> Spec:
    """Spec of what writes where copies go. `warps`: of a block."""
    return Spec("sort_copies.cuh", f"PlaceCopies<{warps}>", _COPIES)


def sort_by_expert(experts: Tensor, first: int | None, workspace: Tensor, *rest: Tensor) -> None:
    """See te_dist.ops.sort_by_expert."""
    index, choices, positions, counts = rest
    num_experts, (rows, copies) = counts.shape[0], experts.shape
    chunks, warps = -(-experts.numel() // CHUNK), _WARPS if num_experts <= MOST_EXPERTS // _WARPS else 1
    outputs = tuple(tensor.data_ptr() for tensor in rest)
    given = (experts.data_ptr(), rows * copies, first or 0, num_experts, chunks)
    values = (*given, workspace.data_ptr(), copies, _STAY if first is None else rows * copies, *outputs)
    blocks = (-(-chunks // warps), 1)
    if chunks:
        launch(count(warps), experts, blocks, values)
    launch(BEFORE, experts, (-(-(num_experts + 1) // _WARPS), 1), values)
    if chunks:
        launch(place(warps), experts, blocks, values)
