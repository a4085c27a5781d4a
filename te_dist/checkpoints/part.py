"""Part: a rectangle of a whole tensor, as torch.distributed.checkpoint wants to be told of it.

[Note: Who writes a shared value]
A cut may go through the block that one stored value covers (a scale tile). Every shard that touches the block then
holds the value, and the checkpoint must hold it once: it is written by the shard that has the block's first row and
column. Shards are rectangles of one grid, so what a shard writes is again a rectangle: what it holds, without the
first row or column of values where those begin in another shard. When reading, every shard fills all that it holds.
A value that covers a whole dimension is offered by all shards; DCP keeps one of several offers at the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from te_dist.formats import WHOLE, Field, Region, Span, geometry
from te_dist.grouped import GroupedStorage
from te_dist.tensor import QuantizedStorage


class Part(torch.Tensor):
    """Shape and dtype are those of the whole; nothing can be computed with it.

    Attributes:
        held: what this rank holds, filled when a checkpoint is read; any strides.
        offset: place of the first of `held` in the whole.
        skipped: along each dimension, how many leading values other ranks write.
    """

    held: Tensor
    offset: tuple[int, ...]
    skipped: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], held: Tensor, *, offset: tuple[int, ...], skipped: tuple[int, ...]
    ) -> Part:
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=held.dtype, device=held.device)

    def __init__(
        self, shape: tuple[int, ...], held: Tensor, *, offset: tuple[int, ...], skipped: tuple[int, ...]
    ) -> None:
        self.held, self.offset, self.skipped = held, offset, skipped

    @staticmethod
    def of_field(field: Field, storage: QuantizedStorage, whole: Region) -> Part:
        """The values of `field` in the stored order, unpadded, placed in the field of the `whole` matrix."""
        spans = list(zip(storage.region.blocks(field.grain), (storage.region.rows, storage.region.cols), strict=True))
        offset = [blocks.start for blocks, _ in spans]
        skipped = [_begun_before(span, grain) for (_, span), grain in zip(spans, field.grain, strict=True)]
        offset[field.inner_dim] //= field.pack
        if field.order == "km":
            offset.reverse()
            skipped.reverse()
        values = geometry.compact(field, storage.buffers[field.name], storage.region)
        if not all(storage.region.shape) and all(whole.shape):
            skipped = list(values.shape)  # an empty shard has nothing to tell, a value of the whole included
        return Part(field.compact_shape(whole), values, offset=tuple(offset), skipped=tuple(skipped))

    @staticmethod
    def of_members(field: Field, storage: GroupedStorage, whole: Region, *, place: tuple[int, int]) -> Part:
        """The same for all members of a group that are here, (members, outer, inner).

        `place`: which member of the whole group is the first here, and how many there are in all.
        """
        matrix = QuantizedStorage(storage.format, storage.buffers, storage.region, dtype=storage.dtype)
        of_matrix, (first, num_members) = Part.of_field(field, matrix, whole), place
        shape, offset = (num_members, *of_matrix.shape), (first, *of_matrix.offset)
        skipped = of_matrix.skipped if len(of_matrix.skipped) == len(shape) else (0, *of_matrix.skipped)
        return Part(shape, of_matrix.held, offset=offset, skipped=skipped)

    @staticmethod
    def of_dtensor(tensor: DTensor) -> Part:
        """The local values of a plain DTensor."""
        return Part.placed_as(tensor, tensor.to_local())

    @staticmethod
    def placed_as(tensor: DTensor, held: Tensor) -> Part:
        """Plain values that lie as this rank's part of a DTensor does."""
        (chunk,) = tensor.__create_chunk_list__()
        return Part(tuple(tensor.shape), held, offset=tuple(chunk.offsets), skipped=(0,) * tensor.dim())

    def copied_to_cpu(self) -> Part:
        """What this rank writes, in memory of its own."""
        written = self._written().to("cpu", copy=True)
        return Part(tuple(self.shape), written, offset=self._written_at(), skipped=(0,) * written.dim())

    def as_whole(self, *, is_given: bool) -> Tensor:
        """The whole tensor: what this rank writes, if it is one that gives its part, and zeros elsewhere."""
        whole, written = torch.zeros(self.shape, dtype=self.dtype, device=self.device), self._written()
        if is_given:
            whole[tuple(slice(o, o + n) for o, n in zip(self._written_at(), written.shape, strict=True))] = written
        return whole

    def _written(self) -> Tensor:
        return self.held[tuple(slice(skip, None) for skip in self.skipped)]

    def _written_at(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.skipped, strict=True))

    # -- the protocol of torch.distributed.checkpoint --------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        written = self._written()
        if not written.numel() and self.numel():
            return []
        offset = torch.Size(self._written_at())
        chunk = ChunkStorageMetadata(offsets=offset, sizes=written.shape)
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape)
        return [WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.held.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # NOTE: what is written begins where what is held does, unless something is skipped; so the offset tells them.
        return self.held if index.offset == torch.Size(self.offset) else self._written()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}: a Part only says where values lie; use what is `held`")


def _begun_before(span: Span, grain: int) -> int:
    """1 where `span` starts inside a block, whose value the shard before it writes; else 0."""
    return 0 if grain == WHOLE or not len(span) else int(span.start % grain != 0)
