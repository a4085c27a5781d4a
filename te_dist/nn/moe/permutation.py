"""Rows sorted by expert and back again: on the device, without waiting for it, in an order that never varies.

Shapes: S source rows, k copies of each, R sorted rows, E experts, H columns.

[Note: Sorted rows]
Every source row is copied to the rows of its k experts. `index` leads from sorted rows to source rows, `positions` from
the copies of a source row to sorted rows. Forward and backward of both directions are gathers: a source row takes the
sum of its k sorted rows, where a scatter would add in an order of its own. Rows keep the order of their sources within
an expert, so that sums over an expert's rows do not depend on how sources are spread over ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.sorting import MOST_EXPERTS
from te_dist.kernels.tape import Tapes
from te_dist.nn.group_fronts import gather_sum
from te_dist.nn.once import once_differentiable
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.ops.sort_by_expert import sorted_copies, workspace_size
from te_dist.ops.source import Gathered

_sorts, _values = Tapes(max_tapes=1024), Tapes(max_tapes=1024)


class Permutation(NamedTuple):
    """Where rows lie once sorted. See [Note: Sorted rows].

    Attributes:
        index: int64 (R,), the source row of every sorted row.
        choices: int64 (R,), which of the S * k copies every sorted row is: copy j of row s is s * k + j.
        positions: int64 (S, k), the sorted row of every copy; of copies that are elsewhere R or more, where nothing is.
        counts: int64 (E,), rows of each expert; they come one expert after the other, then rows that are nobody's.
    """

    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  (no tuple is searched)
    choices: Tensor
    positions: Tensor
    counts: Tensor


def sort_by_expert(experts: Tensor, num_experts: int, *, first: int | None = None) -> Permutation:
    """Sorts copies of rows by the experts they go to, copies for one expert in the order of the rows.

    Nothing waits for the device, and it can be captured in a CUDA graph.

    Args:
        experts: int64 (S, k), numbers from `first` to below `first` + E; all others sort behind and are nobody's.
        num_experts: E.
        first: of the experts that are here; rows for others are elsewhere, and have the position S * k, at which
            nothing is. None for 0, where others are not elsewhere.
    """
    experts = experts.to(torch.int64).contiguous()
    if not 0 < num_experts <= MOST_EXPERTS:
        return Permutation(*sorted_copies(experts, num_experts, first=first))
    found, _ = _sorts.run((num_experts, first), (experts,), lambda: (_sorted(experts, num_experts, first), None))
    return Permutation(*found)


def _sorted(experts: Tensor, num_experts: int, first: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(index, choices, positions, counts)."""
    copies, device = experts.numel(), experts.device
    workspace = torch.empty(workspace_size(copies, num_experts), dtype=torch.int32, device=device)
    shapes = (copies,), (copies,), experts.shape, (num_experts,)
    index, choices, positions, counts = (torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes)
    found = dict(index=index, choices=choices, positions=positions, counts=counts)
    ops.sort_by_expert(experts, first=first, workspace=workspace, **found)
    return index, choices, positions, counts


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Sorted rows (R, H) of source rows `x` (S, H). The gradient of a source row is the sum of those of its copies."""
    return _Permute.apply(x, permutation.index, permutation.positions)


def unpermute(rows: Tensor, permutation: Permutation, *, probabilities: Tensor | None = None) -> Tensor:
    """(S, H): sums, in fp32 and rounded once, of the copies of every source row in sorted rows `rows` (R, H).

    Args:
        probabilities: f32 (S, k), by which copies are multiplied; differentiable. None where that was done before.
    """
    if probabilities is None:
        return _Unpermute.apply(rows, permutation.index, permutation.positions)
    return _WeightedUnpermute.apply(rows, probabilities, permutation)


def permute_probabilities(probabilities: Tensor, permutation: Permutation) -> Tensor:
    """f32 (R,) of f32 (S, k), or ValueError: the probability of each sorted row; differentiable."""
    if probabilities.shape != permutation.positions.shape:
        raise ValueError(
            f"probabilities: got shape {tuple(probabilities.shape)} for choices {tuple(permutation.positions.shape)}, "
            "wanted one of each choice"
        )
    return _PermuteValues.apply(probabilities, permutation.choices, permutation.positions)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gather_sum(grad.contiguous(), positions), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return gather_sum(rows, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class _WeightedUnpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probabilities: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(rows, probabilities, permutation.index, permutation.choices, permutation.positions)
        total = torch.zeros(probabilities.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
        for copy, of_copy in enumerate(permutation.positions.unbind(1)):
            total += _at(rows, of_copy).float() * probabilities[:, copy, None]
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        rows, probabilities, index, choices, positions = ctx.saved_tensors
        spread = grad.index_select(0, index).float()
        of_rows = (spread * probabilities.flatten()[choices, None]).to(rows.dtype)
        of_values = _at((spread * rows).sum(1), positions.flatten()).view_as(probabilities)
        return of_rows, of_values, None


class _PermuteValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return taken(values, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        (positions,) = ctx.saved_tensors
        return taken(grad, positions), None, None


def taken(values: Tensor, places: Tensor) -> Tensor:
    """The values, in whatever shape, at the places, in the shape of those; zeros where there is no such place."""
    if torch.is_grad_enabled() or values.dtype not in HIGH_PRECISION:  # there may be a graph of backward
        return _at(values.flatten(), places.flatten()).view(places.shape)
    (found,), _ = _values.run(None, (values, places), lambda: ((_values_at(values, places),), None))
    return found


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """Rows at places (n,), zeros behind the last."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))).index_select(0, places.clamp(max=len(rows)))


def _values_at(values: Tensor, places: Tensor) -> Tensor:
    out = torch.empty(places.shape, dtype=values.dtype, device=values.device)
    rows, index = values.contiguous().view(-1, 1), places.contiguous().view(-1)
    ops.evaluate(Gathered(rows, index), out=out.view(-1, 1))
    return out
