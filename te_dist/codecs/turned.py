"""Encodings of matrices as those of rows in groups, where need be of the transpose."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from te_dist.codecs.base import Codec
from te_dist.codecs.tiled import side
from te_dist.formats import Direction, Encoding, Field


@lru_cache(maxsize=1024)
def as_rows(encoding: Encoding) -> tuple[Encoding, Direction, bool] | None:
    """How rows in groups are encoded that lie as `encoding`: (encoding, direction, whether of the transpose).

    None where the codec does more than that: it draws numbers, transforms, or has an amax for every row.
    """
    codec = encoding.codec
    assert isinstance(codec, Codec)
    turned = codec.turned
    if turned is None or not codec.deterministic:
        return None
    if encoding.fields[0].order == "mk":
        return encoding, Direction.COLUMNWISE if side(encoding) == "col" else Direction.ROWWISE, False
    return Encoding(turned, tuple(map(_turned, encoding.fields))), Direction.ROWWISE, True


def _turned(field: Field) -> Field:
    """Of the transpose: the same bytes."""
    return replace(field, grain=field.grain[::-1], tile=field.tile[::-1], order="km" if field.order == "mk" else "mk")
