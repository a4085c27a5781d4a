"""Rows that travel as codes and scales: quantized once where they are, multiplied as they arrive.

[Note: Quantized payload]
Every token is quantized rowwise before it is copied, once and not once for each expert. Codes and scales of its copies
are sent, sorted by expert, and multiplied: a row has the same codes alone and among others, so that the product is bit
for bit that of rows sent plainly. The gradient of the weights sums over rows and wants codes by columns: those are
quantized where the rows arrive, from what the codes stand for. Gradients and what experts make travel plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_dist.formats import Direction, Encoding, Field, Region, geometry
from te_dist.nn.group_fronts import gather_sum
from te_dist.nn.moe.exchange import Carrier, gradients_back, send_rows
from te_dist.nn.moe.permutation import Permutation
from te_dist.nn.once import once_differentiable
from te_dist.quantizers import Quantizer
from te_dist.tensor import QuantizedStorage, QuantizedTensor

ROWWISE = Direction.ROWWISE


@dataclass(frozen=True)
class Route:
    """The way of copies to their experts.

    Attributes:
        outgoing: sorts them where they are.
        incoming: tells how they are sorted by expert where they arrive; asked once rows are on their way.
        by: brings them there.
    """

    outgoing: Permutation
    incoming: Callable[[], Permutation]
    by: Carrier


def check_rows(quantizer: Quantizer, dtype: torch.dtype) -> Encoding:
    """The rowwise encoding of a quantizer.

    Raises:
        ValueError: rows of it cannot be moved one by one.
    """
    encoding = quantizer.declare(dtype)[ROWWISE]
    for field in encoding.fields:
        if field.tile[0] != 1 or field.alignment(0) != 1 or field.sealed:
            raise ValueError(
                f'payload="quantized" sends rows one by one, got {quantizer}, whose rows have {field.name!r} in '
                'common; choose a recipe whose inputs have scales within rows, or payload="plain"'
            )
    return encoding


def send(x: Tensor, route: Route, *, quantizer: Quantizer | None, beside: Tensor) -> Tensor:
    """Copies of rows of `x` (S, H) at their experts: as they arrive, or, where there is a quantizer, sorted, as a
    QuantizedTensor (R, H), rowwise. `beside`: as of `send_rows`.
    """
    if quantizer is None:
        return send_rows(x, route.outgoing, by=route.by, beside=beside)
    return _SendQuantized.apply(x, beside, route, quantizer)


class _SendQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, route: Route, quantizer: Quantizer) -> QuantizedTensor:
        outgoing, ctx.by = route.outgoing, route.by
        fields = check_rows(quantizer, x.dtype).fields
        here = quantizer.encode(x, ROWWISE).select(ROWWISE)
        arrived = [ctx.by.take(_rows(field, here), outgoing.index) for field in fields]
        incoming = route.incoming()
        ctx.save_for_backward(outgoing.positions, incoming.positions)
        there = Region.whole(incoming.index.shape[0], x.shape[1])
        found = [_stored(*each, there, incoming.index) for each in zip(fields, arrived, strict=True)]
        buffers = {field.name: buffer for field, buffer in zip(fields, found, strict=True)}
        return QuantizedTensor(QuantizedStorage(here.format, buffers, there, dtype=x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        outgoing, incoming = ctx.saved_tensors
        return gradients_back(gather_sum(grad, incoming), outgoing, ctx.by), None, None, None


def _rows(field: Field, here: QuantizedStorage) -> Tensor:
    """What rows store of `field`, a row for each."""
    wire = geometry.compact(field, here.buffers[field.name], here.region)
    return wire if field.inner_dim == 1 else wire.T


def _stored(field: Field, arrived: Tensor, there: Region, index: Tensor) -> Tensor:
    """What the rows `index` of those that arrived store of `field`."""
    rows = arrived.index_select(0, index)
    if field.inner_dim == 1 and not field.is_padded(there):
        return rows
    return geometry.padded(field, rows if field.inner_dim == 1 else rows.T, there)
