"""Plain-torch definition of every codec: the witness that compiled kernels are compared with, byte by byte.

Exact and slow, on the CPU. Codes and scales are 2-D tensors in logical (row, col) order, unpacked and unpadded; scales
lie on the tile grid. `phase` is the offset of the first element inside its tile, (0, 0) where no cut goes through one.
The payload of a NaN among decoded values is not defined.
"""

from te_dist.codecs.reference.casts import e2m1_cast, e2m1_decode, float8_cast, float8_decode, fp8_max
from te_dist.codecs.reference.float8 import (
    decode_float8,
    encode_float8_block,
    encode_float8_tensor,
    scale_from_amax,
)
from te_dist.codecs.reference.hadamard import hadamard
from te_dist.codecs.reference.mxfp8 import (
    decode_mxfp8,
    e8m0_ceil,
    e8m0_decode,
    e8m0_from_amax,
    e8m0_reciprocal,
    encode_mxfp8,
)
from te_dist.codecs.reference.nvfp4 import decode_nvfp4, encode_nvfp4, tensor_scale, tile_sum
from te_dist.codecs.reference.philox import philox4x32, philox_bytes
from te_dist.codecs.reference.tiles import spread, tile_amax, tiles

__all__ = [
    "decode_float8",
    "decode_mxfp8",
    "decode_nvfp4",
    "e2m1_cast",
    "e2m1_decode",
    "e8m0_ceil",
    "e8m0_decode",
    "e8m0_from_amax",
    "e8m0_reciprocal",
    "encode_float8_block",
    "encode_float8_tensor",
    "encode_mxfp8",
    "encode_nvfp4",
    "float8_cast",
    "float8_decode",
    "fp8_max",
    "hadamard",
    "philox4x32",
    "philox_bytes",
    "scale_from_amax",
    "spread",
    "tensor_scale",
    "tile_amax",
    "tile_sum",
    "tiles",
]
