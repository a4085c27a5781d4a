"""Formats as data: which buffers a quantized matrix is stored in, and the geometry that follows."""

from te_dist.formats.field import Direction, Encoding, Field, Format, Numerics
from te_dist.formats.group import AnyGroup, Group, RaggedGroup, group_of
from te_dist.formats.region import WHOLE, Chunks, Partition, Region, Span

__all__ = [
    "WHOLE",
    "AnyGroup",
    "Chunks",
    "Direction",
    "Encoding",
    "Field",
    "Format",
    "Group",
    "Numerics",
    "Partition",
    "RaggedGroup",
    "Region",
    "Span",
    "group_of",
]
