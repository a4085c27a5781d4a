"""Cut: how a tensor was cut into shards by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from te_dist.formats import Chunks, Region


@dataclass(frozen=True)
class Cut:
    """What a row shard was cut from: enough to say where every other shard lies.

    Attributes:
        region: rows and columns of the tensor before the cut.
        shape: its nominal shape; its first dimension was cut.
        of_part: whether that tensor was itself a part of a larger matrix (tensor parallelism).
        dim: that was cut.
    """

    dim: ClassVar[int] = 0

    region: Region
    shape: torch.Size
    of_part: bool = False

    @property
    def unit(self) -> int:
        """Matrix rows behind one index of the first dimension (more than one for stacked weights)."""
        return len(self.region.rows) // self.shape[0] if self.shape[0] else 1

    @property
    def place(self) -> Region:
        """Of the tensor before the cut."""
        return self.region

    @property
    def is_of_several(self) -> bool:
        """Whether there is more than one index along what was cut."""
        return self.shape[0] > 1

    def parts(self, num_shards: int) -> Chunks[Region]:
        """Region of every shard, in rank order."""
        return self.region.chunk(num_shards, self.unit)

    def leaves_all(self, shard: Region) -> bool:
        """Whether the cut was over one rank, so that `shard` is all there was."""
        return shard == self.region and self.is_of_several
