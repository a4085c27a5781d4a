"""What codecs have in common whose scales belong to tiles: one pass over the input writes both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from te_dist.codecs.base import Codec, KnownEncoding, Plane, logical_view
from te_dist.formats import WHOLE, Region
from te_dist.formats.region import Pair

# By side of the quantize ops, the keywords of a direction.
_KEYWORDS = {way: tuple(f"{way}_{part}" for part in ("tile", "amax", "data", "scale")) for way in ("row", "col")}


@dataclass(frozen=True)
class TiledCodec(Codec):
    """Attributes: tile: (rows, cols) that share a scale."""

    tile: Pair

    @property
    def amax_tiles(self) -> tuple[Pair, ...]:
        return (self.tile,)

    @property
    def turned(self) -> TiledCodec | None:
        return replace(self, tile=self.tile[::-1])

    @cached_property
    def pass_key(self) -> object:  # type: ignore[override]
        return replace(self, tile=(0, 0))


def plane_arguments(planes: Sequence[Plane], region: Region) -> dict[str, Any]:
    """`row_tile`, `row_amax`, `row_data`, `row_scale` and the same for `col`, as the quantize ops take them."""
    arguments = {}
    for encoding, stored, amax in planes:
        values = (
            encoding.codec.tile,
            amax[-1] if amax else None,
            stored[0],
            logical_view(encoding.fields[1], stored[1], region),
        )
        arguments.update(zip(_KEYWORDS[side(encoding)], values, strict=True))
    return arguments


def group_arguments(planes: Sequence[Plane]) -> dict[str, Any]:
    """`row_tile`, `row_data`, `row_scale` and the same for `col`, as the quantize ops of groups take them."""
    arguments: dict[str, Any] = {}
    for encoding, stored, _ in planes:
        tile, _, data, scale = _KEYWORDS[side(encoding)]
        arguments |= {tile: encoding.codec.tile, data: stored[0], scale: stored[1]}
    return arguments


@lru_cache(maxsize=1024)
def side(encoding: KnownEncoding) -> str:
    """The side of the quantize ops: "col" where the data is transposed or a scale covers a run of rows, else "row"."""
    data, scale = encoding.fields[:2]
    runs_along_rows = scale.grain[0] not in (1, WHOLE) and scale.grain[1] == 1
    return "col" if data.order == "km" or runs_along_rows else "row"
