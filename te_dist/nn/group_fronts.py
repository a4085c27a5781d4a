"""What linear maps of rows in groups compute on the way: of an input before it is quantized, of an output, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.evaluate import values
from te_dist.ops.panel_sums import column_sums
from te_dist.ops.source import Gathered, Source, SwiGlu, SwiGluGradient, row_sums_shape


class GroupFront(NamedTuple):
    """What is computed of an input on its way into the quantizer of groups.

    Attributes:
        name: two fronts of one name are one.
        source: of the input and the tensors beside it, of as many rows as there are in groups.
        gradient: of the gradient of the source's values and the same tensors: that of the input, as it is, or as a
            source of as many rows. None where the map in front finds it, see [Note: Fronts of the map behind].
        of_beside: of that, a source once it was read, and the tensors beside: the gradients of these. Of rows behind
            the last group they hold anything; of whole numbers autograd reads none.
    """

    name: Hashable
    source: Callable[..., Source]
    gradient: Callable[..., Tensor | Source] | None
    of_beside: Callable[..., tuple[Tensor, ...]]

    def handed(self) -> GroupFront:
        """The same for a map that has handed its gradient to the one in front."""
        return self._replace(name=("handed", self.name), gradient=None)

    def gradients(self, grad: Tensor, x: Tensor, *beside: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        """By the input and each tensor beside it; rows behind the last group of `table` are zeros, whatever `x` holds.

        Args:
            grad: of the values.
        """
        assert self.gradient is not None
        found = self.gradient(grad, x, *beside)
        if isinstance(found, Tensor):
            return found, *self.of_beside(found, *beside)
        gradients = values(found), *self.of_beside(found, *beside)
        for gradient in gradients:
            clear_rest(gradient, table)
        return gradients


class GroupEpilogue(NamedTuple):
    """What is made of the rows of the output, before anybody sees them. It is linear in them.

    Attributes:
        name: two of one name are one.
        apply: of the rows and the tensors behind the product, which have no gradients.
        gradient: of the gradient of what was made and the same tensors, that of the rows, as a source of as many.
    """

    name: Hashable
    apply: Callable[..., Tensor]
    gradient: Callable[..., Source]


def clear_rest(rows: Tensor, table: Tensor) -> None:
    """Writes zeros behind the last group: of what was computed with anything that lay there, which may be NaN."""
    ops.clear_rest(rows if rows.dim() > 1 else rows[:, None], table=table)


def gather_sum(rows: Tensor, positions: Tensor) -> Tensor:
    """(S, H): of every row of `positions` (S, k) the sum of those rows of `rows` (R, H), in fp32 and rounded once."""
    out = torch.empty(positions.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    ops.gather_sum(rows, positions=positions, out=out)
    return out


def _of_swiglu(grad: Tensor, x: Tensor) -> Source:
    return SwiGluGradient(x, grad)


def _of_weighted_swiglu(grad: Tensor, x: Tensor, probability: Tensor) -> Source:
    row_sums = torch.empty(row_sums_shape(grad), dtype=torch.float32, device=grad.device)
    return SwiGluGradient(x, grad, probability, row_sums)


SWIGLU = GroupFront("swiglu", SwiGlu, _of_swiglu, lambda _: ())
WEIGHTED_SWIGLU = GroupFront(  # beside: f32 (T,), see `SwiGlu`
    "weighted_swiglu", SwiGlu, _of_weighted_swiglu, lambda source, _: (column_sums(source.row_sums),)
)
# Rows of the input by their numbers, gathered on the way into the quantizer; beside: `Permutation.index`, `.positions`.
GATHERED = GroupFront(
    "gathered",
    source=lambda x, index, positions: Gathered(x, index),
    gradient=lambda grad, x, index, positions: gather_sum(grad, positions),
    of_beside=lambda found, index, positions: (),
)
# Copies of a row are summed, and gradients of sums gathered on the way into the quantizer; behind: the same two.
SUMMED = GroupEpilogue(
    "summed", lambda rows, index, positions: gather_sum(rows, positions), lambda grad, index, _: Gathered(grad, index)
)
