"""Numerics: how values become codes and scales, and back. One file per codec."""

from te_dist.codecs.base import Amax, Codec, Plane, encode, encode_groups
from te_dist.codecs.block import Block
from te_dist.codecs.high_precision import HighPrecision
from te_dist.codecs.mxfp8 import MxFp8
from te_dist.codecs.nvfp4 import NvFp4
from te_dist.codecs.tensorwise import Tensorwise

FAMILIES = (Block, HighPrecision, MxFp8, NvFp4, Tensorwise)

__all__ = [
    "FAMILIES",
    "Amax",
    "Block",
    "Codec",
    "HighPrecision",
    "MxFp8",
    "NvFp4",
    "Plane",
    "Tensorwise",
    "encode",
    "encode_groups",
]
