"""Copies of rows sorted by the expert each goes to: what brings the rows of a mixture of experts together."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.kernels.sorting import CHUNK, MOST_EXPERTS
from te_dist.ops._checks import check_output, check_packed
from te_dist.ops._library import register
from te_dist.ops._taped import taped

_NARROW = torch.iinfo(torch.int16).max  # experts that int16 holds: a radix sort passes over fewer bytes


def workspace_size(num_copies: int, num_experts: int) -> int:
    """How many int32 `sort_by_expert` works in."""
    return (num_experts + 1) * -(-num_copies // CHUNK)


@taped
def sort_by_expert(experts: Tensor, *, first: int | None = None, workspace: Tensor, **found: Tensor) -> None:
    """Sorts copies by their expert; copies for one expert keep their order. Copy j of row s has the number s * k + j.

    Written are `index`, int64 (S * k,), the row of every sorted copy; `choices`, int64 (S * k,), its number;
    `positions`, int64 (S, k), where a copy is once sorted; `counts`, int64 (E,), copies for each expert.

    Args:
        experts: int64 (S, k), contiguous: numbers of experts from `first` to below `first` + E; copies with others sort
            behind.
        first: at least 0, where others are elsewhere: their position is S * k, at which nothing is. None for 0, where
            they are not.
        workspace: int32 (`workspace_size(S * k, E)`,), is overwritten.
        found: what is written, all four.

    Raises:
        ValueError: a type, shape or number that does not fit, more than 8192 experts, or 2^31 copies.
    """
    index, choices, positions, counts = (found[name] for name in ("index", "choices", "positions", "counts"))
    if experts.dim() != 2:  # noqa: PLR2004
        raise ValueError(f"experts: got {experts.dim()} dimensions, wanted (rows, copies); reshape it")
    copies, num_experts = experts.numel(), counts.numel()
    if not 0 < num_experts <= MOST_EXPERTS or copies >= 2**31:
        raise ValueError(
            f"got {copies} copies for {num_experts} experts, wanted less than 2^31 for 1 to {MOST_EXPERTS}; cut them"
        )
    if first is not None and first < 0:
        raise ValueError(f"first: got {first}, wanted the number of an expert, or None")
    check_packed("experts", experts, (torch.int64,), experts.shape)
    check_packed("workspace", workspace, (torch.int32,), (workspace_size(copies, num_experts),))
    for name, output, shape in (
        ("index", index, (copies,)),
        ("choices", choices, (copies,)),
        ("positions", positions, tuple(experts.shape)),
        ("counts", counts, (num_experts,)),
    ):
        check_output(name, output, torch.int64, shape)
    torch.ops.te_dist.sort_by_expert(experts, first, workspace, index, choices, positions, counts)


def sorted_copies(
    experts: Tensor, num_experts: int, *, first: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(index, choices, positions, counts) as `sort_by_expert` defines them, of any number of experts, by torch."""
    # E for nobody's. What wraps around is nobody's too.
    keys = (experts.flatten() - (first or 0)).clamp(-1, num_experts).remainder(num_experts + 1)
    keys = keys.to(torch.int16) if num_experts < _NARROW else keys
    found, order = keys.sort(stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(order.shape[0], device=order.device)
    if first is not None:
        positions.masked_fill_(keys == num_experts, experts.numel())
    numbers = torch.arange(num_experts, dtype=found.dtype, device=found.device)
    ends = torch.searchsorted(found, numbers, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return order // max(experts.shape[1], 1), order, positions.view_as(experts), counts


def _cpu(experts: Tensor, first: int | None, _: Tensor, *outputs: Tensor) -> None:
    for output, found in zip(outputs, sorted_copies(experts, outputs[-1].shape[0], first=first), strict=True):
        output.copy_(found)


register(
    "sort_by_expert(Tensor experts, int? first, Tensor(w!) workspace, Tensor(a!) index, Tensor(b!) choices, "
    "Tensor(c!) positions, Tensor(d!) counts) -> ()",
    _cpu,
    kernels.sort_by_expert,
)
