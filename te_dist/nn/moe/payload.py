"""Rows that travel as codes and scales: quantized once where they are, multiplied as they arrive.

[Note: Quantized payload]
Every token is quantized rowwise before it is copied, once and not once for each expert. Codes and scales of its copies
are sent, sorted by expert, and multiplied: a row has the same codes alone and among others, so that the product is bit
for bit that of rows sent plainly. The gradient of the weights sums over rows and wants codes by columns: those are
quantized where the rows arrive, from what the codes stand for. Gradients and what experts make travel plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_dist.formats import Direction, Encoding, Field, Region, geometry
from te_dist.nn.moe.exchange import Carrier
from te_dist.nn.moe.permutation import Permutation, gather_sum
from te_dist.nn.once import once_differentiable
from te_dist.quantizers import Quantizer
from te_dist.tensor import QuantizedStorage, QuantizedTensor

ROWWISE = Direction.ROWWISE


@dataclass(frozen=True)
class Route:
    """The way of copies to their experts.

    Attributes:
        outgoing: sorts them where they are.
        incoming: sorts them by expert where they arrive.
        by: brings them there.
    """

    outgoing: Permutation
    incoming: Permutation
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


def send_quantized(x: Tensor, route: Route, *, quantizer: Quantizer, beside: Tensor) -> Any:
    """Copies of rows of `x` (S, H) at their experts, sorted: a QuantizedTensor (R, H), rowwise.

    `beside`: as of `send_rows`.
    """
    return _SendQuantized.apply(x, beside, route, quantizer)


class _SendQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, route: Route, quantizer: Quantizer) -> QuantizedTensor:
        ctx.by = route.by
        ctx.save_for_backward(route.outgoing.positions, route.incoming.positions)
        encoding = check_rows(quantizer, x.dtype)
        here = quantizer.encode(x, ROWWISE).select(ROWWISE)
        there = Region.whole(route.incoming.index.shape[0], x.shape[1])
        buffers = {field.name: _moved(field, here, there, route) for field in encoding.fields}
        return QuantizedTensor(QuantizedStorage(here.format, buffers, there, dtype=x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        outgoing, incoming = ctx.saved_tensors
        copies = ctx.by.send_back(gather_sum(grad, incoming))
        # See [Note: Gradients of experts over ranks].
        return gather_sum(copies, outgoing) * ctx.by.num_ranks, None, None, None


def _moved(field: Field, here: QuantizedStorage, there: Region, route: Route) -> Tensor:
    """What copies of rows store of `field`, at their experts."""
    wire = geometry.compact(field, here.buffers[field.name], here.region)
    rows = wire if field.inner_dim == 1 else wire.T
    arrived = route.by.take(rows, route.outgoing.index).index_select(0, route.incoming.index)
    if field.inner_dim == 1 and not field.is_padded(there):
        return arrived
    return geometry.padded(field, arrived if field.inner_dim == 1 else arrived.T, there)
