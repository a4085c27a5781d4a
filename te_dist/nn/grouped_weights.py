"""The matrices of a linear map of rows in groups, as products read them: stacked, one buffer for each field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.codecs.grouped_gemm import Members
from te_dist.formats import Direction, Encoding, Format, Region
from te_dist.nn.products import main_grad_of
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.tensor import QuantizedStorage, QuantizedTensor


class Stack(NamedTuple):
    """Matrices of one shape and format, a member for each group.

    Attributes:
        format: of each member.
        buffers: by field name (G, *field.shape(region)), of one direction or of both.
        region: of a member, (N, K).
    """

    format: Format
    buffers: dict[str, Tensor]
    region: Region

    def members(self, direction: Direction) -> Members:
        """As a product reads them that sums along `direction`; derived from the other one where it is absent.

        Raises:
            RuntimeError: the direction is neither present nor a relayout of the one that is.
        """
        encoding, sums_over = self.format[direction], 1 if direction is Direction.ROWWISE else 0
        if all(name in self.buffers for name in encoding.names):
            stored = tuple(self.buffers[name] for name in encoding.names)
        else:
            stored = self._derived(encoding, direction)
        return Members(encoding, stored, self.region, sums_over)

    def _derived(self, encoding: Encoding, direction: Direction) -> tuple[Tensor, ...]:
        num_members = len(next(iter(self.buffers.values())))
        made = []
        for member in range(num_members):
            buffers = {name: buffer[member] for name, buffer in self.buffers.items()}
            storage = QuantizedStorage(self.format, buffers, self.region, dtype=torch.float32)
            if not self.format.columnwise_is_derivable:
                raise storage.absent(direction)
            made.append(storage.with_derived(direction).stored(direction))
        return tuple(torch.stack(parts) for parts in zip(*made, strict=True))


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(G, N, K) of weights as `stacked` takes them."""
    if len(weights) == 1 and weights[0].dim() == 3:
        groups, rows, cols = weights[0].shape
        return groups, rows, cols
    rows, cols = weights[0].shape
    return len(weights), rows, cols


def stacked(weights: Sequence[Tensor], quantizer: Quantizer, *directions: Direction) -> Stack:
    """Weights as products along `directions` read them; plain ones are quantized, quantized ones are taken as they are.

    Args:
        weights: one tensor (G, N, K), or (N, K) of each group, which are copied to lie in one buffer.
        quantizer: of plain weights.
    """
    first = weights[0]
    if isinstance(first, QuantizedTensor):
        return _stacked_quantized(weights, *directions)
    whole = first if first.dim() == 3 else torch.stack(tuple(weights))
    return encoded(whole, quantizer, *directions)


def encoded(whole: Tensor, quantizer: Quantizer, *directions: Direction) -> Stack:
    """Every matrix of `whole` (G, N, K), plain, quantized alone; values that stay what they are are not copied."""
    num_members, rows, cols = whole.shape
    region, format = Region.whole(rows, cols), quantizer.declare(whole.dtype)
    if isinstance(quantizer, IdentityQuantizer):
        (field,) = format.canonical.fields
        return Stack(format, {field.name: whole.detach().to(field.dtype).contiguous()}, region)
    format = format.select(*directions)
    for direction in format.directions:
        format[direction].codec.check(region)
    buffers = {
        field.name: (torch.zeros if field.is_padded(region) else torch.empty)(
            (num_members, *field.shape(region)), dtype=field.dtype, device=whole.device
        )
        for field in format.fields
    }
    for number, member in enumerate(whole.detach()):
        its = {name: buffer[number] for name, buffer in buffers.items()}
        quantizer.write(member, QuantizedStorage(format, its, region, dtype=whole.dtype))
    return Stack(format, buffers, region)


def _stacked_quantized(weights: Sequence[Tensor], *directions: Direction) -> Stack:
    storages = [weight.storage for weight in weights]
    format, region = storages[0].format, storages[0].region
    names = [f.name for f in format.fields if all(f.name in storage.buffers for storage in storages)]
    wanted = {name for direction in directions for name in format[direction].names}
    if wanted <= set(names):
        names = [name for name in names if name in wanted]
    buffers = {name: torch.stack([storage.buffers[name] for storage in storages]) for name in names}
    return Stack(format, buffers, region)


class MainGrads(NamedTuple):
    """Where the gradient of the weights is added up.

    Attributes:
        whole: fp32 (G, N, K), to which the product is added, or which it overwrites.
        parts: for one weight for each group, what `whole` is added to afterwards; none where it is their memory.
        adds: whether what is there counts.
    """

    whole: Tensor
    parts: Sequence[Tensor]
    adds: bool

    @staticmethod
    def of(parameters: Sequence[Tensor], shape: tuple[int, int, int], *, adds: bool) -> MainGrads:
        """Of these weights.

        Raises:
            RuntimeError: a weight has no `main_grad`, or one that does not fit.
        """
        found = [main_grad_of(parameter) for parameter in parameters]
        if parameters[0].dim() == 3:
            return MainGrads(found[0], (), adds)
        whole = in_one_piece(found)
        if whole is not None:
            return MainGrads(whole, (), adds)
        return MainGrads(torch.zeros(shape, device=found[0].device), found, adds)

    def finish(self) -> None:
        """Writes what does not lie in one piece."""
        if self.parts:
            write = torch._foreach_add_ if self.adds else torch._foreach_copy_
            write(list(self.parts), list(self.whole.unbind()))


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors of one shape as one, where they lie one behind the other in one allocation; else None."""
    first = tensors[0]
    start, size = first.data_ptr(), first.nbytes
    home = first.untyped_storage().data_ptr()
    for number, tensor in enumerate(tensors):
        if tensor.data_ptr() != start + number * size or tensor.untyped_storage().data_ptr() != home:
            return None
    strides = first.numel(), *first.stride()
    return first.detach().as_strided((len(tensors), *first.shape), strides, first.storage_offset())
