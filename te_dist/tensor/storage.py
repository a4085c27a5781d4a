"""QuantizedStorage: a format, the buffers it declares, and the region of the whole matrix they describe.

Activations use it bare; parameters and public boundaries wrap it in a `QuantizedTensor`. Everything that moves its
bytes is written here once and derived from the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from te_dist import codecs
from te_dist.codecs import Amax
from te_dist.formats import Direction, Field, Format, Numerics, Region, geometry
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source
from te_dist.tensor import writes
from te_dist.tensor.cut import Cut
from te_dist.tensor.relayout import relaid

Amaxes = Mapping[Numerics, Amax]
How = Literal["decode", "operand"]
_NO_DIMS: frozenset[int] = frozenset()


class QuantizedStorage:
    """A quantized matrix.

    Attributes:
        format: what is declared; constant for life.
        buffers: stored tensor by field name. A direction is present when all its fields are; a derivable columnwise
            direction may be absent and is rebuilt by `update_usage`.
        region: rows and columns of the whole matrix that the buffers describe.
        dtype: floating-point type of the values this stands for.
        cut: what this was cut from as a row shard; None for a matrix that was not cut.
        cut_dims: dimensions (0: rows, 1: columns) along which it was cut out of a larger matrix.
        unsettled: values last written into a shard by their own amax, as long as the ranks that share a scale with
            it have not agreed on one; None once they have.
        initial: (rows, cols) on the CPU, the values that were quantized at initialization or loaded, where they were
            asked to be kept; None once others have been written.
        mastered: by which write of an optimizer these values came from a master; copies of them keep it. 0 for values
            that came otherwise.
        latest_mastered: the last such write into this storage, see `follows_master`.
        num_writes: how often other values were written through this storage.
    """

    matrix_dim: ClassVar[int] = 0  # of nominal dimensions, the first whose cut leaves parts of a matrix
    owner: Any = None  # a group, of which this is a view of one member, see grouped.members.MemberView

    __slots__ = (
        "__weakref__",
        "buffers",
        "cut",
        "cut_dims",
        "dtype",
        "format",
        "initial",
        "latest_mastered",
        "mastered",
        "num_writes",
        "region",
        "unsettled",
    )

    def __init__(
        self,
        format: Format,
        buffers: dict[str, Tensor],
        region: Region,
        *,
        dtype: torch.dtype,
        cut: Cut | None = None,
    ) -> None:
        self.format = format
        self.buffers: dict[str, Tensor] = buffers
        self.region = region
        self.dtype = dtype
        self.cut = cut
        self.cut_dims: frozenset[int] = _NO_DIMS
        self.unsettled: Tensor | None = None
        self.initial: Tensor | None = None
        self.mastered = self.latest_mastered = 0
        self.num_writes = 0

    def __call__(self) -> NoReturn:
        """Raises: what calls `tensor.storage()` takes it for the method of a plain tensor, which has one memory."""
        raise RuntimeError(
            "a quantized tensor has no torch storage: its bytes lie in several buffers (tensor.storage.buffers). To "
            "write weights into files of plain tensors use te_dist.checkpoints.high_precision_state_dict; a Trainer of "
            "Hugging Face that saves is in docs/recipes.md"
        )

    def holding(self, buffers: dict[str, Tensor], format: Format | None = None) -> QuantizedStorage:
        """A storage of the same matrix around other buffers, or of a part of its format; it has no history."""
        return QuantizedStorage(format or self.format, buffers, self.region, dtype=self.dtype, cut=self.cut)

    # -- what is here -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(iter(self.buffers.values())).device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of the logical matrix."""
        return self.region.shape

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Directions whose fields are all present."""
        if len(self.buffers) == len(self.format.fields):
            return self.format.directions
        return tuple(filter(self.has, self.format.directions))

    @property
    def lasting_directions(self) -> tuple[Direction, ...]:
        """Those of `directions` that every pass finds."""
        return self.directions

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields that are present."""
        return tuple(f for f in self.format.fields if f.name in self.buffers)

    @property
    def place(self) -> Any:
        """Where this lies in what it was cut from: a region, or a group of them."""
        return self.region

    @property
    def members(self) -> tuple[QuantizedStorage, ...]:
        """The matrices that are quantized each on its own: this one, or those of a group."""
        return (self,)

    def split(self, values: Tensor) -> list[Tensor]:
        """The (rows, cols) of each of `members` out of values for all of them."""
        return [values.detach().view(self.shape)]

    def matrices(self, values: Tensor) -> list[tuple[QuantizedStorage, Tensor]]:
        """What is quantized from what so that all `members` are: as few matrices as can be."""
        return list(zip(self.members, self.split(values), strict=True))

    def uncut(self, shape: torch.Size) -> Any:
        """The `Cut` of a tensor of this nominal shape that has not been cut yet."""
        return Cut(self.region, shape)

    def get_usages(self) -> dict[str, bool]:
        """{"rowwise": ..., "columnwise": ...}: which directions are present."""
        return {d.value: d in self.directions for d in Direction}

    def nbytes(self) -> int:
        """Allocated bytes of all buffers, padding included."""
        return sum(b.untyped_storage().nbytes() for b in self.buffers.values())

    def has(self, direction: Direction) -> bool:
        """Whether all fields of `direction`, which the format declares, are present."""
        return all(map(self.buffers.__contains__, self.format[direction].names))

    @property
    def missing(self) -> list[str]:
        """Names of canonical fields that are not there, as `update_usage` frees them."""
        return [f.name for f in self.format.canonical.fields if f.name not in self.buffers]

    def stored(self, direction: Direction) -> tuple[Tensor, ...]:
        """The stored tensors of `direction`, in the order of its fields."""
        return tuple(map(self.buffers.__getitem__, self.format[direction].names))

    # -- directions ---------------------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Creates the directions asked for (True), frees those not wanted (False), leaves the others (None).

        Raises:
            RuntimeError: a direction is asked for that is neither present nor a relayout of what is; or this is a
                shard, which would lack what ranks gather.
        """
        wanted = {Direction.ROWWISE: rowwise_usage, Direction.COLUMNWISE: columnwise_usage}
        for direction, usage in wanted.items():
            if usage and direction not in self.directions:
                self.derive(direction)
        kept = {f.name for d in self.directions if wanted[d] is not False for f in self.format[d].fields}
        if not kept:
            raise RuntimeError("update_usage would leave no direction at all; keep rowwise or columnwise")
        freed = [f.name for f in self.format.canonical.fields if f.name in self.buffers and f.name not in kept]
        if self.cut is not None and freed:
            raise RuntimeError(
                f"update_usage would free {freed} of a shard, which FSDP2 gathers from every rank in each pass; keep "
                "both directions of weights that are sharded"
            )
        self.buffers = {name: b for name, b in self.buffers.items() if name in kept}

    def derive(self, direction: Direction, out: Mapping[str, Tensor] | None = None) -> None:
        """Adds `direction` as a relayout of the other one, into `out` (stored tensor by field name) where given."""
        other = Direction.COLUMNWISE if direction is Direction.ROWWISE else Direction.ROWWISE
        if not self.format.columnwise_is_derivable or not self.has(other):
            raise RuntimeError(
                f"the {direction.value} direction is not present and no relayout of what is: this format quantizes "
                f"its directions independently. Present: {[d.value for d in self.directions]}; quantize it again"
            )
        for src, dst in zip(self.format[other].fields, self.format[direction].fields, strict=True):
            if dst.name not in self.buffers or out is not None and dst.name in out:
                target = None if out is None else out.get(dst.name)
                self.buffers[dst.name] = relaid(src, dst, self.buffers[src.name], region=self.region, out=target)

    def with_derived(self, direction: Direction) -> QuantizedStorage:
        """The same buffers with `direction` added by `derive`; this storage is left as it is."""
        both = self.holding(dict(self.buffers))
        both.derive(direction)
        return both

    def blank(
        self, format: Format, *, device: torch.device | str | None = None, fields: Iterable[Field] = ()
    ) -> QuantizedStorage:
        """Uninitialised buffers for values such as these in `format`, or for some of its fields."""
        return empty(format, self.region, dtype=self.dtype, device=device or self.device, fields=fields)

    def select(self, *directions: Direction) -> QuantizedStorage:
        """The same buffers, seen as a format of `directions` only."""
        part = self.format.select(*directions)
        buffers = {name: self.buffers[name] for d in directions for name in part[d].names}
        return self.holding(buffers, part)

    # -- values -------------------------------------------------------------------------------------------------

    def quantize_(self, x: Tensor | Source, amaxes: Amaxes | None = None) -> None:
        """Writes `x` into every direction that is present.

        Args:
            x: any shape of this many elements, fp32, bf16 or fp16; or a source of this shape.
            amaxes: by codec, the amax grids to use instead of those of `x`: what ranks have agreed on.
        """
        matrix = as_matrix(x, self.shape)
        encodings = {d: self.format[d] for d in self.format.independent if self.has(d)}
        planes = [
            codecs.Plane(encoding, self.stored(d), amaxes.get(encoding.codec) if amaxes else None)
            for d, encoding in encodings.items()
        ]
        codecs.encode(matrix, self.region, planes)
        self.note_values(matrix, is_settled=amaxes is not None)

    def note_values(self, matrix: Tensor | Source, *, is_settled: bool = False) -> None:
        """Notes that values of this shape have been quantized into the buffers.

        Args:
            is_settled: whether by scales that ranks agree on.
        """
        self.initial, self.mastered = None, 0
        self.num_writes += 1
        self.unsettled = None if is_settled or not self.may_share_scales() else values(matrix).clone()

    @property
    def is_of_kept_group(self) -> bool:
        """Whether this is a member of a group that keeps what was quantized."""
        return self.owner is not None and self.owner.initial is not None

    def note_initial(self, values: Tensor) -> None:
        """Keeps a copy of the values that were quantized, see `initial`; of values on meta there is none.

        NOTE: it waits for the device, which a graph that is captured must not; what it replays keeps nothing.
        """
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured or values.is_meta or self.device.type == "meta":
            return
        contiguous = values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.initial = contiguous.view(self.shape)

    def may_share_scales(self) -> bool:
        """Whether other shards can hold a part of a tile that this one holds a part of."""
        if self.cut is None and not self.cut_dims:
            return False
        tiles = (tile for d in self.format.directions for tile in self.format[d].codec.amax_tiles)
        # NOTE: a shard of all rows counts as cut: other ranks hold shards without rows, and must not settle alone.
        dims = self.cut_dims if self.cut is None else self.cut_dims | {0}
        return any(tile[dim] != 1 for tile in tiles for dim in dims)

    def dequantize(self, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """Values (rows, cols) in `dtype` (default: the nominal one), from `direction` (default: rowwise if present)."""
        return self._decoded("decode", dtype, direction)

    def operand(self, direction: Direction, dtype: torch.dtype) -> Tensor:
        """What a GEMM along `direction` multiplies (rows, cols): the values, before any transform is undone."""
        return self._decoded("operand", dtype, direction)

    def _decoded(self, how: How, dtype: torch.dtype | None, direction: Direction | None) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        self.decode_into(out, how, direction=direction)
        return out

    def decode_into(self, out: Tensor, how: How, *, direction: Direction | None = None) -> None:
        """Writes what `dequantize` (decode) or `operand` gives into `out` (rows, cols; fp32, bf16 or fp16)."""
        present = self.directions
        direction = direction or present[0]
        if direction not in present:
            if not (self.format.columnwise_is_derivable and present):
                raise self.absent(direction)
            direction = present[0]  # the same values, laid out the other way
        encoding = self.format[direction]
        getattr(encoding.codec, how)(self.stored(direction), encoding.fields, self.region, out=out)

    def absent(self, direction: Direction) -> RuntimeError:
        """The error of a read in a direction that is neither present nor a relayout of what is."""
        return RuntimeError(
            f"the {direction.value} direction is needed, present is {[d.value for d in self.directions]}, of which it "
            "is no relayout: quantize the values again, in that direction too"
        )

    # -- saving for backward ------------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor], QuantizedStorage]:
        """Takes the buffers out: (those that cannot be derived, this storage without buffers).

        What `restore_from_saved` puts back is the canonical part; a derivable direction is rebuilt when it is read.
        """
        canonical = [f.name for f in self.format.canonical.fields]
        names = canonical if all(name in self.buffers for name in canonical) else list(self.buffers)
        tensors = [self.buffers[name] for name in names]
        nothing: dict[str, Any] = dict.fromkeys(names)
        shell = self.holding(nothing)
        self.buffers = {}
        return tensors, shell

    def restore_from_saved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of `prepare_for_saving`, on the storage it returned; gives back the tensors that belong to others."""
        names = list(self.buffers)
        self.buffers = dict(zip(names, tensors, strict=False))
        return list(tensors[len(names) :])

    def clear(self) -> None:
        """Drops all buffers."""
        self.buffers = {}

    # -- sharding -----------------------------------------------------------------------------------------------

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the fields that cross the wire: canonical, and not equal on all shards already."""
        return tuple(f.name for f in self.format.canonical.fields if not f.is_shared(0))

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], Region]:
        """(wire of each of `fsdp_buffer_fields`, the region they describe)."""
        by_name = {f.name: f for f in self.format.fields}
        names = self.fsdp_buffer_fields()
        wires = tuple(geometry.compact(by_name[n], self.buffers[n], self.region).contiguous() for n in names)
        return wires, self.region

    def fsdp_assign_gathered(self, buffers: Sequence[Sequence[Tensor]], parts: Sequence[Region]) -> None:
        """Fills this storage from the wires of its row shards: `buffers[rank]` as `fsdp_extract_buffers` gave them."""
        by_name = {f.name: f for f in self.format.fields}
        for index, name in enumerate(self.fsdp_buffer_fields()):
            wires = [wires[index] for wires in buffers]
            self.buffers[name] = geometry.assemble(by_name[name], wires, parts, self.region, self.buffers.get(name))
        for direction in self.directions:
            if any(f.name not in self.fsdp_buffer_fields() for f in self.format[direction].fields):
                self._refresh(direction)

    def _refresh(self, direction: Direction) -> None:
        if direction is Direction.COLUMNWISE and self.format.columnwise_is_derivable:
            row, col = self.format[Direction.ROWWISE].fields, self.format[direction].fields
            self.derive(direction, {d.name: self.buffers[d.name] for s, d in zip(row, col, strict=True) if s != d})

    def narrow(self, dim: int, start: int, length: int) -> QuantizedStorage:
        """A storage of its own for `length` rows (dim 0) or columns (dim 1) from `start`: canonical fields only."""
        part = self.region.narrow(dim, start, length)
        fields = self.format.sufficient(self.buffers)
        buffers = {f.name: geometry.narrow(f, self.buffers[f.name], self.region, part) for f in fields}
        narrowed = QuantizedStorage(self.format, buffers, part, dtype=self.dtype)
        narrowed.cut_dims = self.cut_dims | ({dim} if part != self.region else _NO_DIMS)
        if self.initial is not None:
            narrowed.initial = self.initial.narrow(dim, start, length).clone()
        return narrowed

    def become(self, place: Any) -> None:
        """Uninitialised buffers (padding zero) of the same fields for another part of the whole."""
        self.buffers = geometry.empty_all(self.fields, place, device=self.device)
        self.region = place

    def adopt(self, source: QuantizedStorage) -> None:
        """Becomes a copy of `source`, of the same format, in place: every view of this storage sees it."""
        self.buffers = {name: buffer.clone() for name, buffer in source.buffers.items()}
        self.region, self.cut, self.cut_dims = source.region, source.cut, source.cut_dims
        self._take_history(source)

    # -- masters ------------------------------------------------------------------------------------------------

    @property
    def follows_master(self) -> bool:
        """Whether the values are those that an optimizer last wrote here from a master: also where they were others in
        between, and a copy of them was written back."""
        return self.mastered == self.latest_mastered != 0

    def note_master(self) -> None:
        """Notes that the values are those of a master now."""
        self.initial = None
        self.mastered = self.latest_mastered = writes.next_write()

    # -- buffers ------------------------------------------------------------------------------------------------

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """A storage around `fn` of every buffer."""
        buffers = {name: fn(buffer) for name, buffer in self.buffers.items()}
        mapped = self.holding(buffers)
        mapped.cut_dims = self.cut_dims
        mapped.unsettled = None if self.unsettled is None else fn(self.unsettled)
        mapped.initial, mapped.mastered, mapped.latest_mastered = self.initial, self.mastered, self.latest_mastered
        return mapped

    def copy_(self, source: QuantizedStorage, *, non_blocking: bool = False) -> None:
        """Takes over the bytes of `source`, of the same format and region; directions only this one has are derived.

        Raises:
            RuntimeError: a direction is present here that is neither in `source` nor a relayout of what is.
        """
        missing = [d.value for d in self.directions if d not in source.directions]
        if missing and not self.format.columnwise_is_derivable:
            raise RuntimeError(
                f"cannot copy: the source has no {missing[0]} direction, which is no relayout of what it has; "
                "dequantize it and quantize the values, or give up that direction here by update_usage"
            )
        for field in self.fields:
            if field.name in source.buffers:
                self.buffers[field.name].copy_(source.buffers[field.name], non_blocking=non_blocking)
        for direction in self.directions:
            if direction not in source.directions:
                self._copy_derived(source, direction)
        self._take_history(source)

    def _copy_derived(self, source: QuantizedStorage, direction: Direction) -> None:
        """A direction of which `source` has the other one, and which is a relayout of that."""
        names = [name for name in self.format[direction].names if name not in source.buffers]
        if len(self.directions) > 1:  # of what has been copied
            return self.derive(direction, {name: self.buffers[name] for name in names})
        derived = source.with_derived(direction)
        for name in names:
            self.buffers[name].copy_(derived.buffers[name])

    def _take_history(self, source: QuantizedStorage) -> None:
        """What is known of values that are those of `source` from now on."""
        master, write = writes.noted_master(self), self.mastered
        self.unsettled, self.initial, self.mastered = source.unsettled, source.initial, source.mastered
        self.num_writes += 1
        writes.put_back(self, master, write)

    def __repr__(self) -> str:
        present = "+".join(d.value for d in self.directions) or "empty"
        return f"QuantizedStorage({self.shape[0]}x{self.shape[1]}, {present}: {', '.join(self.buffers)})"


def empty(
    format: Format, region: Region, *, dtype: torch.dtype, device: torch.device | str, fields: Iterable[Field] = ()
) -> QuantizedStorage:
    """Uninitialised buffers (padding zero) for `fields` of `format`; for all of them where none are named."""
    buffers = geometry.empty_all(tuple(fields) or format.fields, region, device=device)
    return QuantizedStorage(format, buffers, region, dtype=dtype)


def quantize(
    x: Tensor, format: Format, *, region: Region | None = None, amaxes: Amaxes | None = None
) -> QuantizedStorage:
    """Quantizes `x` of shape (..., K) as a matrix of its last dimension.

    Args:
        x: fp32, bf16 or fp16.
        region: where the matrix lies in the whole it is a part of; the whole by default.
        amaxes: by codec, the amax grids to use instead of those of `x`.

    Raises:
        ValueError: the format cannot hold a matrix of this region.
    """
    cols = x.shape[-1]
    region = region or Region.whole(x.numel() // cols if cols else 0, cols)
    for direction in format.directions:
        format[direction].codec.check(region)
    storage = empty(format, region, dtype=x.dtype, device=x.device)
    storage.quantize_(x, amaxes)
    return storage


def find_amaxes(x: Tensor | Source, format: Format, region: Region) -> dict[Numerics, Amax]:
    """By codec of `format`, the largest magnitudes of `x` that fix its scales."""
    matrix = as_matrix(x, region.shape)
    # NOTE: ranks lay out what they agree on in this order; that of a set differs between processes.
    distinct = dict.fromkeys(format[d].codec for d in format.directions)
    return {codec: codec.amax(matrix, region) for codec in distinct if codec.amax_tiles}


def as_matrix(x: Tensor | Source, shape: tuple[int, int]) -> Tensor | Source:
    """`x` as codecs take it; a source has the shape already."""
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(f"cannot quantize {x.dtype}: convert to float32, bfloat16 or float16 first")
    if isinstance(x, Source):
        assert x.shape == tuple(shape)
        return x
    return x.detach().reshape(shape).contiguous()
