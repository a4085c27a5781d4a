"""GroupedTensor: a `torch.Tensor` that stands for the values of a `GroupedStorage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from te_dist.formats import AnyGroup, Format, Group, group_of
from te_dist.grouped import storage as storages
from te_dist.grouped.storage import GroupedStorage, Values
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.parts import check_writable
from te_dist.tensor.quantized_tensor import OpTable, check_shape, count_writes, mode_of


class GroupedTensor(QuantizedTensor):
    """Quantized matrices as one tensor, of shape (members, rows, cols) where these are equal.

    Each member is quantized on its own and all lie in one buffer per field, so that products in groups read them where
    they are. Of members that differ the shape is (rows of all, cols), or (values of all,) where columns differ too.
    As of any quantized tensor, views share one storage, and buffers can be read as attributes by their field names.

    Attributes:
        storage: the buffers, their format and the group they hold.
    """

    matrix_dim: ClassVar[int] = GroupedStorage.matrix_dim

    storage: GroupedStorage

    def __new__(
        cls,
        storage: GroupedStorage | GroupedTensor,
        shape: Sequence[int] | None = None,
        *,
        strides: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> Self:
        if not isinstance(storage, GroupedStorage):
            return cls.around(storage, shape, requires_grad=requires_grad)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            torch.Size(storage.shape if shape is None else shape),
            strides=strides,
            dtype=storage.dtype,
            device=storage.device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        storage: GroupedStorage | GroupedTensor,
        shape: Sequence[int] | None = None,
        *,
        strides: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> None:
        if isinstance(storage, GroupedStorage):  # else see `around`
            self.storage = storage  # pyright: ignore[reportIncompatibleVariableOverride]

    def like(self, storage: GroupedStorage, shape: Sequence[int] | None = None) -> Self:  # type: ignore[override]
        """Another tensor of this class around `storage`; of this one's strides, where it has its shape."""
        shape = torch.Size(storage.shape if shape is None else shape)
        strides = self.stride() if shape == self.shape and not self.is_contiguous() else None
        with mode_of(self):
            return type(self)(storage, shape, strides=strides)

    @property
    def group(self) -> AnyGroup:
        """Regions of the members."""
        return self.storage.group

    @property
    def num_members(self) -> int:
        """How many matrices these are."""
        return len(self.storage.regions)

    @property
    def members(self) -> tuple[QuantizedTensor, ...]:
        """Each matrix as a tensor around views of the buffers: what is written into one is written into the group."""
        with mode_of(self):
            return tuple([QuantizedTensor(self.storage.view(index)) for index in range(self.num_members)])

    split_into_quantized_tensors = members.fget  # under the name that TransformerEngine has for it

    def dequantize_members(self, *, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The plain matrix of each member, in `dtype` (default: the nominal one)."""
        return self.storage.views(self.dequantize(dtype=dtype))

    def quantize_(self, x: Values) -> GroupedTensor:
        """Quantizes into the buffers of this tensor: a tensor of its shape, or one matrix for each member."""
        check_writable(self)
        if isinstance(x, Tensor):
            check_shape(x, self)
        self.storage.quantize_(x)
        count_writes(self)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        storage = self.storage
        place = storage.group, storage.dtype, storage.cut
        return list(storage.buffers), (type(self), storage.format, *place, storage.lasting_directions)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> GroupedTensor:
        cls, format, group, dtype, cut, _ = context
        storage = GroupedStorage(format, dict(inner), group, dtype=dtype, cut=cut)
        return cls(storage, outer_size, strides=outer_stride)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        fields = ", ".join(f"{n}: {str(b.dtype)[6:]}{list(b.shape)}" for n, b in self.storage.buffers.items())
        what = f"{storages.describe(self.group)}, {str(self.dtype)[6:]}, {self.device}, {{{fields}}}"
        return f"{type(self).__name__}({list(self.shape)}, {what})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OPS.call(func, args, kwargs or {})


OPS = OpTable()


def empty(
    shapes: Sequence[tuple[int, int]] | Group,
    format: Format,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> GroupedTensor:
    """Uninitialised members (padding zero).

    Args:
        shapes: (rows, cols) of each member, or a group.
        dtype: nominal dtype.
        device: torch's default device where none is given; "meta" for none.
    """
    group = shapes if isinstance(shapes, Group) else group_of(shapes)
    device = torch.get_default_device() if device is None else device
    return GroupedTensor(storages.empty(format, group, dtype=dtype, device=device))


def quantize(x: Values, format: Format) -> GroupedTensor:
    """Quantizes each matrix of (members, rows, cols), or of a list of any shapes, on its own."""
    return GroupedTensor(storages.quantize(x, format))


def join(members: Sequence[QuantizedTensor]) -> GroupedTensor:
    """One group of quantized matrices of one format: their bytes are copied.

    Raises:
        ValueError: there are none, their formats differ, or one was cut out of a larger matrix.
    """
    first = members[0].storage if members else None
    if first is None or any(member.format != first.format for member in members):
        raise ValueError(f"a group is of one format, got {len({m.format for m in members})}; quantize all to one")
    if any(member.storage.cut is not None or member.storage.cut_dims for member in members):
        raise ValueError("a member was cut out of a larger matrix; join whole ones, and cut the group")
    fields = [f for f in first.fields if all(f.name in member.storage.buffers for member in members)]
    group = group_of([member.storage.shape for member in members])
    storage = storages.empty(first.format, group, dtype=first.dtype, device=first.device, fields=fields)
    for target, member in zip(storage.members, members, strict=True):
        for field in fields:
            target.buffers[field.name].copy_(member.storage.buffers[field.name])
    return GroupedTensor(storage)
