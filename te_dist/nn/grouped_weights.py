"""The matrices of a linear map of rows in groups, as products read them: one storage, a member for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.codecs.grouped_gemm import Members
from te_dist.formats import Direction, Group
from te_dist.grouped import GroupedStorage, GroupedTensor, join
from te_dist.grouped import storage as groups
from te_dist.nn.products import main_grad_of
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.tensor import QuantizedTensor


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(G, N, K) of weights as `stacked` takes them."""
    first = tuple(weights[0].shape)
    return first if len(first) == 3 else (len(weights), *first)  # type: ignore[return-value]  # noqa: PLR2004


def members_of(stack: GroupedStorage, direction: Direction) -> Members:
    """As a product reads them that sums along `direction`; derived from the other one where it is absent.

    Raises:
        RuntimeError: the direction is neither present nor a relayout of the one that is.
    """
    if not stack.has(direction):
        if not stack.format.columnwise_is_derivable:
            raise stack.absent(direction)
        stack = stack.with_derived(direction)
    sums_over = 1 if direction is Direction.ROWWISE else 0
    return Members(stack.format[direction], stack.stored(direction), stack.region, sums_over)


def stacked(weights: Sequence[Tensor], quantizer: Quantizer, *directions: Direction) -> GroupedStorage:
    """Weights as products along `directions` read them; plain ones are quantized, quantized ones are taken as they are.

    Args:
        weights: one tensor (G, N, K), or (N, K) of each group, which are copied to lie in one buffer.
        quantizer: of plain weights.
    """
    first = weights[0]
    if isinstance(first, GroupedTensor):
        return first.storage
    if isinstance(first, QuantizedTensor):
        return _joined(weights, *directions)
    whole = first if first.dim() == 3 else torch.stack(tuple(weights))  # noqa: PLR2004
    return encoded(whole.detach(), quantizer, *directions)


def encoded(whole: Tensor, quantizer: Quantizer, *directions: Direction) -> GroupedStorage:
    """Every matrix of `whole` (G, N, K), plain, quantized alone; values that stay what they are are not copied."""
    group, format = Group.whole(*whole.shape), quantizer.declare(whole.dtype)
    if isinstance(quantizer, IdentityQuantizer):
        (field,) = format.canonical.fields
        return GroupedStorage(format, {field.name: whole.to(field.dtype).contiguous()}, group, dtype=whole.dtype)
    format = format.select(*directions)
    for direction in format.directions:
        format[direction].codec.check(group.region)
    storage = groups.empty(format, group, dtype=whole.dtype, device=whole.device)
    for matrix, member in zip(whole, storage.members, strict=True):
        quantizer.write(matrix, member)
    return storage


def together(weights: Sequence[Tensor]) -> Tensor:
    """One tensor of all groups, of one of each: plain or quantized."""
    if isinstance(weights[0], QuantizedTensor):
        return join(weights)  # type: ignore[arg-type]
    return torch.stack(tuple(weights))


def _joined(weights: Sequence[QuantizedTensor], *directions: Direction) -> GroupedStorage:
    """Quantized matrices in one buffer for each field: what is needed for `directions`, by a copy."""
    storages = [weight.storage for weight in weights]
    first = storages[0]
    names = [field.name for field in first.fields]
    wanted = {name for direction in directions for name in first.format[direction].names}
    if wanted <= set(names):
        names = [name for name in names if name in wanted]
    buffers = {name: torch.stack([storage.buffers[name] for storage in storages]) for name in names}
    return GroupedStorage(first.format, buffers, Group.whole(len(weights), *first.region.shape), dtype=first.dtype)


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
