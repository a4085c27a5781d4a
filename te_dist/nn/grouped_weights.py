"""The matrices of a linear map of rows in groups, as products read them: one storage, a member for each group."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist import _C
from te_dist.codecs.grouped_gemm import Members, Rows, as_given, reads_as_they_lie
from te_dist.formats import Direction, Group
from te_dist.fsdp2.parameter import GroupedParameter, QuantizedParameter
from te_dist.grouped import GroupedStorage, GroupedTensor, join
from te_dist.grouped import storage as groups
from te_dist.kernels.tape import PLAIN
from te_dist.nn.members import at_once
from te_dist.nn.products import main_grad_of
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.tensor import QuantizedStorage, QuantizedTensor


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(G, N, K) of weights as `stacked` takes them."""
    first = tuple(weights[0].shape)
    return first if len(first) == 3 else (len(weights), *first)  # type: ignore[return-value]  # noqa: PLR2004


def members_of(stack: GroupedStorage, direction: Direction, rows: Rows, *, out: Tensor) -> Members:
    """As the product of `rows` reads them that sums along `direction` and is written to `out`.

    Where that is absent the other one is read, or what is derived of it, whichever is sooner.

    Raises:
        RuntimeError: the direction is neither present nor a relayout of the one that is.
    """
    sums_over = 1 if direction is Direction.ROWWISE else 0
    read: QuantizedStorage = stack
    if not stack.has(direction):
        if not stack.format.columnwise_is_derivable:
            raise stack.absent(direction)
        for present in stack.directions:
            members = Members(stack.format[present], stack.stored(present), stack.region, sums_over)
            if reads_as_they_lie(rows, members, out):
                return members
        read = stack.with_derived(direction)
    return Members(read.format[direction], read.stored(direction), read.region, sums_over)


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
    return encoded(together(weights, dims=3).detach(), quantizer, *directions)


def encoded(whole: Tensor, quantizer: Quantizer, *directions: Direction) -> GroupedStorage:
    """Every matrix of `whole` (G, N, K), plain, quantized alone, if need be by launches of its own.

    Values that stay what they are are not copied.
    """
    group, format = Group.whole(*whole.shape), quantizer.declare(whole.dtype)
    if isinstance(quantizer, IdentityQuantizer):
        (field,) = format.canonical.fields
        return GroupedStorage(format, {field.name: whole.to(field.dtype).contiguous()}, group, dtype=whole.dtype)
    format = format.select(*directions)
    for direction in format.directions:
        format[direction].codec.check(group.region)
    buffers = at_once(whole, format) if quantizer.writes_by_format else None
    if buffers is not None:
        return GroupedStorage(format, buffers, group, dtype=whole.dtype)
    storage = groups.empty(format, group, dtype=whole.dtype, device=whole.device)
    for matrix, member in zip(whole, storage.members, strict=True):
        quantizer.write(matrix, member)
    return storage


def together(tensors: Sequence[Tensor], *, dims: int) -> Tensor:
    """One tensor of all groups, of so many dimensions: itself where there is one, else a copy of those of each."""
    if tensors[0].dim() == dims:
        return tensors[0]
    if isinstance(tensors[0], QuantizedTensor):
        return join(tensors)  # type: ignore[arg-type]
    with as_given(tensors[0].device.type):  # on CPUs torch's autocast stacks no fp16
        return torch.stack(tuple(tensors))


def as_one(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """One plain tensor of all groups, where those of each lie one behind the other; else these."""
    if len(tensors) < 2 or isinstance(tensors[0], QuantizedTensor):  # noqa: PLR2004
        return tensors
    whole = in_one_piece(tensors)
    return tensors if whole is None else (whole,)


class OneBuffer:
    """Quantized matrices of each group that were made as members of one storage, as long as they are its members.

    Attributes:
        storage: of all groups.
    """

    def __init__(self, storage: GroupedStorage) -> None:
        self.storage = storage
        self.members = storage.members
        self._buffers = [member.buffers for member in self.members]

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the members still, and have the very buffers that they were made with."""
        if len(weights) != len(self.members):
            return False
        # NOTE: a plain tensor has a method of the name `storage`, which is no member.
        storages: list[Any] = [weight.storage for weight in weights]
        return all(map(operator.is_, storages, self.members)) and all(
            map(operator.is_, [member.buffers for member in self.members], self._buffers)
        )

    @staticmethod
    def guard(out: Tensor, weights: Sequence[Tensor], label: str) -> None:
        """Lets the backward pass of `out` raise where one of the weights was written since.

        Autograd would see it, but it saves none of them.
        """
        if out.grad_fn is not None:
            versions = [weight._version for weight in weights]
            out.grad_fn.register_prehook(partial(_check_versions, tuple(weights), versions, label))

    def __deepcopy__(self, memo: Any) -> None:
        """Nothing: what is copied of the members is no view of a copy of the storage."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _check_versions(weights: Sequence[Tensor], versions: list[int], label: str, gradients: Any) -> None:
    if [weight._version for weight in weights] != versions:
        raise RuntimeError(
            f"{label}: weights were modified by an inplace operation between the forward pass and this backward pass, "
            "which reads them; run backward before the optimizer's step, or before anything else is written into them"
        )


def _joined(weights: Sequence[Any], *directions: Direction) -> GroupedStorage:
    """Quantized matrices in one buffer for each field: what is needed for `directions`, by a copy."""
    storages: list[QuantizedStorage] = [weight.storage for weight in weights]
    first = storages[0]
    names = [field.name for field in first.fields]
    wanted = {name for direction in directions for name in first.format[direction].names}
    if wanted <= set(names):
        names = [name for name in names if name in wanted]
    buffers = {name: torch.stack([storage.buffers[name] for storage in storages]) for name in names}
    return GroupedStorage(first.format, buffers, Group.whole(len(weights), *first.region.shape), dtype=first.dtype)


def apart(whole: nn.Parameter) -> tuple[list[nn.Parameter], OneBuffer | None]:
    """A parameter for each group, in the memory of the one of all; and what knows of quantized ones that they are."""
    if not isinstance(whole, GroupedParameter):
        return [nn.Parameter(part) for part in _parts(whole.detach())], None
    made, initial = OneBuffer(whole.storage), whole.storage.initial
    parameters = []
    for number, member in enumerate(made.members):
        member.initial = None if initial is None else initial[number]
        parameter = QuantizedParameter(member)
        parameter.keep_initial = whole.keep_initial
        parameters.append(nn.Parameter(parameter))
    return parameters, made


@torch.no_grad()
def packed(parameters: Sequence[Any], known: OneBuffer | None) -> OneBuffer | None:
    """Lays parameters of each group into one buffer, where they do not lie so; what knows of quantized ones.

    Those that are sharded, cut, without values or of different formats are left where they are.
    """
    first = parameters[0]
    if len(parameters) < 2 or first.is_meta or any(isinstance(parameter, DTensor) for parameter in parameters):  # noqa: PLR2004
        return known
    if not isinstance(first, QuantizedTensor):
        if in_one_piece(parameters) is None and len({(p.shape, p.dtype, p.device) for p in parameters}) == 1:
            for parameter, part in zip(parameters, _parts(torch.stack(tuple(parameters))), strict=True):
                parameter.data = part
        return None
    if known is not None and known.holds(parameters):
        return known
    storages = [parameter.storage for parameter in parameters]
    kinds = {(storage.format, storage.region, storage.device, storage.cut, storage.cut_dims) for storage in storages}
    if len(kinds) > 1 or storages[0].cut is not None or storages[0].cut_dims:
        return None
    made = OneBuffer(_joined(parameters, *storages[0].directions))
    for parameter, member, old in zip(parameters, made.members, storages, strict=True):
        member.initial, member.unsettled = old.initial, old.unsettled
        member.mastered, member.latest_mastered = old.mastered, old.latest_mastered
        parameter.storage = member
    return made


def _parts(whole: Tensor) -> list[Tensor]:
    """Tensors in the memory of one, none of which counts as a view of it: each has versions of its own."""
    if whole.is_meta:
        return [torch.empty_like(part) for part in whole]
    home, size = whole.untyped_storage(), whole[0].numel()
    starts = (whole.storage_offset() + number * size for number in range(len(whole)))
    blank = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return [blank.new_empty(0).set_(home, start, whole.shape[1:], whole.stride()[1:]) for start in starts]


class MainGrads(NamedTuple):
    """Where the gradient of the weights is added up.

    Attributes:
        whole: fp32 (G, N, K), to which the product is added, or which it overwrites.
        parts: by number of a group, what of `whole` is added afterwards to what; none where it is their memory.
        adds: whether what is there counts.
    """

    whole: Tensor
    parts: dict[int, Tensor]
    adds: bool

    @staticmethod
    def of(
        parameters: Sequence[Tensor], wanted: Sequence[bool], shape: tuple[int, int, int], *, adds: bool
    ) -> MainGrads:
        """Of those of these weights whose gradient is wanted, which is so of one at least.

        Raises:
            RuntimeError: a weight has no `main_grad`, or one that does not fit.
        """
        if parameters[0].dim() == 3:
            return MainGrads(main_grad_of(parameters[0]), {}, adds)
        if all(wanted):
            main_grad_of(parameters[0])  # what is true of one is true of others in a row
            whole = in_one_piece([getattr(parameter, "main_grad", None) for parameter in parameters])
            if whole is not None:
                return MainGrads(whole, {}, adds)
        found = {number: main_grad_of(parameters[number]) for number, wants in enumerate(wanted) if wants}
        return MainGrads(torch.zeros(shape, dtype=torch.float32, device=parameters[0].device), found, adds)

    def finish(self) -> None:
        """Writes what does not lie in one piece."""
        if self.parts:
            write = torch._foreach_add_ if self.adds else torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
            write(list(self.parts.values()), [self.whole[number] for number in self.parts])


def in_one_piece(tensors: Sequence[Any]) -> Tensor | None:
    """Contiguous tensors of one shape as one, where they lie one behind the other in one allocation; else None."""
    first: Tensor = tensors[0]
    if not _C.cuda.is_row(tuple(tensors), PLAIN):
        return None
    end = first.storage_offset() + len(tensors) * first.numel()
    if end * first.element_size() > first.untyped_storage().nbytes():  # those behind are of another allocation
        return None
    strides = first.numel(), *first.stride()
    return first.detach().as_strided((len(tensors), *first.shape), strides, first.storage_offset())
