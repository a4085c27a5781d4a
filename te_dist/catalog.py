"""Every format te_dist knows: a codec and the fields it is stored in.

This is the one place where layouts are spelled out. Each padding is what a GEMM wants to read: FP8 block scales in
rows of four, MXFP8 and NVFP4 scales in atoms of 128 x 4.
"""

from __future__ import annotations

from typing import Literal

import torch

from te_dist.codecs import Block, HighPrecision, MxFp8, NvFp4, Tensorwise
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.formats import WHOLE, Encoding, Field, Format

U8, F32 = torch.uint8, torch.float32
Dims = Literal[1, 2]  # 1: tiles are runs along the contraction; 2: square tiles, the same in both directions


def float8_tensorwise(
    *, fp8: str = "e4m3", pow2: bool = False, columnwise: Literal["same", "transposed"] = "same"
) -> Format:
    """FP8 with one scale. Hopper's GEMM reads a transposed copy columnwise; others read the rowwise data both ways."""
    codec = Tensorwise(fp8, pow2)
    data = Field("qdata", U8)
    data_t = Field("qdata_t", U8, order="km") if columnwise == "transposed" else data
    scale = Field("scale_inv", F32, (WHOLE, WHOLE))
    return Format(Encoding(codec, (data, scale)), Encoding(codec, (data_t, scale)))


def float8_block(dims: Dims, *, fp8: str = "e4m3", pow2: bool = True) -> Format:
    """FP8 with fp32 scales for 1 x 128 (and 128 x 1) or 128 x 128 tiles."""
    if dims not in (1, 2):
        raise ValueError(f"blocks are runs (1) or squares (2), got {dims!r}")
    if dims == 2:
        row_tile = col_tile = (128, 128)
        row_order, col_order = "mk", "km"
    else:
        row_tile, col_tile = (1, 128), (128, 1)
        row_order, col_order = "km", "mk"  # 1-D scales lie with the tiles outermost, as GEMMs load them
    row_scale = Field("row_scale", F32, row_tile, row_order, pad=(1, 4))
    col_scale = Field("col_scale", F32, col_tile, col_order, pad=(1, 4))
    return Format(
        Encoding(Block(row_tile, fp8, pow2), (Field("row_data", U8), row_scale)),
        Encoding(Block(col_tile, fp8, pow2), (Field("col_data", U8, order="km"), col_scale)),
    )


def mxfp8(dims: Dims, *, fp8: str = "e4m3") -> Format:
    """MXFP8. Square tiles are stored as the GEMM reads them, once for each of their 32 rows or columns."""
    row_tile, col_tile = ((32, 32), (32, 32)) if dims == 2 else ((1, 32), (32, 1))
    row_scale = Field("row_scale", U8, (1, 32), pad=(128, 4), tile=row_tile)
    col_scale = Field("col_scale", U8, (32, 1), pad=(4, 128), tile=col_tile)
    return Format(
        Encoding(MxFp8(row_tile, fp8), (Field("row_data", U8), row_scale)),
        Encoding(MxFp8(col_tile, fp8), (Field("col_data", U8), col_scale)),
    )


def nvfp4(dims: Dims, *, row: NvFp4 | None = None, col: NvFp4 | None = None) -> Format:
    """NVFP4. `row` and `col` give the options of each codec; square tiles share one amax, 1-D directions do not."""
    row_tile, col_tile = ((16, 16), (16, 16)) if dims == 2 else ((1, 16), (16, 1))
    amax = Field("row_amax", F32, (WHOLE, WHOLE))
    col_amax = amax if dims == 2 else Field("col_amax", F32, (WHOLE, WHOLE))
    row_fields = (
        Field("row_data", U8, pack=2),
        Field("row_scale", U8, (1, 16), pad=(128, 4), tile=row_tile),
        amax,
    )
    col_fields = (
        Field("col_data", U8, order="km", pack=2),
        Field("col_scale", U8, (16, 1), "km", pad=(128, 4), tile=col_tile),
        col_amax,
    )
    return Format(Encoding(row or NvFp4(row_tile), row_fields), Encoding(col or NvFp4(col_tile), col_fields))


def nvfp4_row_scaled() -> Format:
    """NVFP4 with an amax per row, rowwise only: for activations of a forward pass."""
    fields = (
        Field("row_data", U8, pack=2),
        Field("row_scale", U8, (1, 16), pad=(128, 4)),
        Field("row_amax", F32, (1, WHOLE)),
    )
    return Format(Encoding(NvFp4((1, 16), row_scaled=True), fields))


def high_precision(dtype: torch.dtype = torch.bfloat16) -> Format:
    """Values as they are, the same for both directions."""
    encoding = Encoding(HighPrecision(dtype), (Field("hp_data", dtype),))
    return Format(encoding, encoding)


def hybrid(rowwise: Format, columnwise: Format) -> Format:
    """Rowwise GEMMs in one format, columnwise GEMMs in another."""
    row, col = rowwise.rowwise, columnwise.columnwise
    if row is None or col is None:
        raise ValueError("a hybrid takes a rowwise and a columnwise encoding; one of the formats has none")
    names = {f.name for f in row.fields}
    if row.codec != col.codec and any(f.name in names for f in col.fields):
        col = Format(columnwise=col).renamed("columnwise_").columnwise
    return Format(row, col)


def _catalog() -> dict[str, Format]:
    block_1d, block_2d = float8_block(1), float8_block(2)
    return {
        "float8_tensorwise": float8_tensorwise(),
        "float8_tensorwise_tn": float8_tensorwise(columnwise="transposed"),
        "float8_tensorwise_e5m2": float8_tensorwise(fp8="e5m2", pow2=True),
        "float8_block_1d": block_1d,
        "float8_block_2d": block_2d,
        "float8_block_2d_fp32_scales": float8_block(2, pow2=False),
        "mxfp8_1d": mxfp8(1),
        "mxfp8_2d": mxfp8(2),
        "nvfp4_1d": nvfp4(1),
        "nvfp4_1d_hadamard": nvfp4(1, col=NvFp4((16, 1), hadamard=SIGN_MASK)),
        "nvfp4_2d": nvfp4(2),
        "nvfp4_row_scaled": nvfp4_row_scaled(),
        "high_precision": high_precision(),
        "hybrid_mxfp8_nvfp4": hybrid(mxfp8(1), nvfp4(1)),
        "hybrid_float8_e4m3_e5m2": hybrid(float8_tensorwise(), float8_tensorwise(fp8="e5m2")),
        "hybrid_block_high_precision": hybrid(block_2d, high_precision()),
    }


FORMATS = _catalog()


def name_of(format: Format) -> str:
    """Of a format in `FORMATS`; the codecs of any other."""
    codecs = " and ".join(f"{direction.value} {format[direction].codec}" for direction in format.directions)
    return next((name for name, known in FORMATS.items() if known == format), codecs)
