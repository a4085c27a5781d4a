"""What a storage is, without its buffers: what those who keep, record or trace the buffers put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.formats import Format, Region
from te_dist.tensor.storage import QuantizedStorage


class StorageKind(NamedTuple):
    """A storage without its buffers, of which it has the names."""

    format: Format
    names: tuple[str, ...]
    region: Region
    dtype: torch.dtype

    @staticmethod
    def of(storage: QuantizedStorage) -> StorageKind:
        """That of a storage."""
        return StorageKind(storage.format, tuple(storage.buffers), storage.region, storage.dtype)

    def storage(self, buffers: Sequence[Tensor]) -> QuantizedStorage:
        """The storage with them."""
        return QuantizedStorage(self.format, dict(zip(self.names, buffers, strict=True)), self.region, dtype=self.dtype)
