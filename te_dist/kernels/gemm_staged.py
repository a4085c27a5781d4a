"""Launches of products of codes with scale bytes that the bulk copy engine can read: one, or in groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from te_dist.kernels.arguments import CODES, MatrixMap, access_bytes, matrix_map, pointer
from te_dist.kernels.gemm import BARRIER_BYTES, ONE_PRODUCT, fits_map
from te_dist.kernels.runtime import launch, multiprocessors, record
from te_dist.kernels.spec import Layout, Spec, once

HEIGHTS, COLS = (256, 128), 128  # of a tile: rows, columns
BITS = {"e2m1": 4, "e4m3": 8, "e5m2": 8, "bfloat16": 16, "float16": 16}  # of a code
ELEMENTS_OF = CODES | {"e2m1": "E2M1", "bfloat16": "BFloat16", "float16": "Float16"}
GRAINS = {"e2m1": 16, "e4m3": 32, "e5m2": 32}  # summed values of a scale byte
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STEP = 64  # summed values of a stage
_ROW_BYTES = 2 * STEP  # of values
_STAGES, _CODE_STAGES = 4, (6, 4)  # of rings: of values, of codes of both operands
PATCHES = 4 * 128 * 40  # bytes through which results are written
ENOUGH_TILES = 128
BAND = 16  # tiles along the rows that are walked over together
_WORD = 4
_SIDES = "ab"
COMMON = " ".join(
    [
        *(f"{side}:T" for side in _SIDES),
        *(f"{side}_scale.{field}" for side in _SIDES for field in ("data:P", "pitch:q", "lines:i", "words:i")),
        *(f"{side}_factor.{field}" for side in _SIDES for field in ("data:P", "kept_stride:q", "group_stride:q")),
        "constant:d bias:P row_factor:P out:P pitch:q bias_type:i out_type:i adds:i fours_fit:i",
        "cols:i steps:i b_summed:i ",
    ]
)
_ONE = Layout(COMMON + ONE_PRODUCT)


@dataclass(frozen=True)
class Side:
    """An operand: lines of codes, and lines of scale bytes along them.

    Attributes:
        codes: u8 (kept, summed) or, where it is turned, (summed, kept); e2m1 two in a byte, never turned.
        kind: "e4m3", "e5m2" or "e2m1".
        scale: u8 (kept, summed / grain), or (summed / grain, kept).
    """

    codes: Tensor
    kind: str
    scale: Tensor
    turned: bool

    @property
    def summed(self) -> int:
        """Values that are summed over."""
        rows, line = self.codes.shape
        return rows if self.turned else line * 8 // BITS[self.kind]

    @property
    def source(self) -> str:
        """What the kernel is told of it when it is compiled."""
        return source(self.kind, turned=self.turned)

    def fits(self) -> bool:
        """Whether the kernel can read it: by the bulk copy engine, and scales by words.

        The last word of a line may end in padding, none of which is used where lines of codes end with a stage.
        """
        scale, (lines, size) = self.scale, self.scale.shape
        pitch, line = scale.stride(0) if lines > 1 else 0, -(-size // _WORD) * _WORD
        if line != size:
            ends_with_stage = not self.turned and self.summed % STEP == 0
            room = scale.untyped_storage().nbytes() - scale.storage_offset() - (lines - 1) * pitch
            if not ends_with_stage or room < line or (lines > 1 and pitch < line):
                return False
        contiguous = size == 1 or scale.stride(1) == 1
        return fits_map(self.codes) and contiguous and access_bytes(_WORD, scale.data_ptr(), pitch) == _WORD

    def map(self, kept: int, *, by_lanes: bool) -> MatrixMap:
        """Boxes of a stage; `kept`: extent of a tile. Rows lie in the swizzle of their length.

        `by_lanes`: of turned codes 128 kept ones in the swizzle of so many bytes, as lanes read them into registers.
        """
        if self.turned:
            return (
                matrix_map(self.codes, (STEP, COLS), swizzle=COLS) if by_lanes else matrix_map(self.codes, (STEP, kept))
            )
        line = STEP * BITS[self.kind] // 8
        return matrix_map(self.codes, (kept, line), swizzle=line)

    def scales(self) -> tuple[int, int, int, int]:
        """Values of a `ScaleView`."""
        lines, size = self.scale.shape
        return self.scale.data_ptr(), self.scale.stride(0) if lines > 1 else 0, lines, -(-size // _WORD)


@cache
def source(kind: str, *, turned: bool = False) -> str:
    """A `Source` of codes with scale bytes."""
    scaling, along = "kFloats" if kind == "e2m1" else "kPowers", "kKept" if turned else "kSummed"
    return f"Source<{ELEMENTS_OF[kind]}, Scaling::{scaling}, {GRAINS[kind]}, Along::{along}, 16>"


@once
def staged(walk: str, layout: Layout, kinds: tuple[str, ...], turned: tuple[bool, ...], height: int) -> Spec:
    """Spec of products whose tiles are those of `walk`."""
    half = "Float16" if kinds == ("e2m1", "e2m1") else "BFloat16"
    sources = [source(kind, turned=turns) for kind, turns in zip(kinds, turned, strict=True)]
    codes = zip(_CODE_STAGES, (height, COLS), kinds, (1, 2), strict=True)
    shared = sum(
        count * (lines * STEP * BITS[kind] // 8 + barriers * BARRIER_BYTES) for count, lines, kind, barriers in codes
    )
    scales = STEP // GRAINS[kinds[0]] * height if turned[0] else 4 * height  # bytes of A's
    shared += _STAGES * (COLS * _ROW_BYTES + scales + 2 * BARRIER_BYTES) + PATCHES
    template = f"GemmStaged<{walk}, {', '.join(sources)}, HalfType::k{half}, {height // 128}>"
    return Spec("gemm_staged.cuh", template, layout, shared_bytes=-(-shared // 1024) * 1024, arch="sm_90a")


def one_product(kinds: tuple[str, ...], turned: tuple[bool, ...], height: int) -> Spec:
    """Spec of one product."""
    return staged("OneProduct", _ONE, kinds, turned, height)


def height_of(rows: int, cols: int, *, groups: int = 1) -> int:
    """Rows of a tile: the larger where there are enough of them, and of tiles for all processors.

    `rows`: of each group, on average.
    """
    tall, low = HEIGHTS
    tiles = groups * -(-rows // tall) * -(-cols // COLS)
    return low if rows <= low or tiles < ENOUGH_TILES else tall


Factors = tuple[tuple[int, int, int], tuple[int, int, int], float]


def common(sides: tuple[Side, Side], height: int, factors: Factors, target: tuple) -> tuple[object, ...]:
    """Values of `COMMON` up to the number of steps. `target`: bias, row factor, whether to add, output."""
    a, b = sides
    bias, row_factor, adds, out = target
    four = 4 * out.element_size()
    fours_fit = access_bytes(four, out.data_ptr(), out.stride(0) * out.element_size()) == four
    bias_type = FLOAT_TYPES[torch.float32 if bias is None else bias.dtype]
    places = (pointer(bias), pointer(row_factor), out.data_ptr(), out.stride(0))
    written = (*places, bias_type, FLOAT_TYPES[out.dtype], adds, fours_fit, out.shape[1])
    *of_sides, constant = factors
    maps = a.map(height, by_lanes=True), b.map(COLS, by_lanes=False)
    return *maps, *a.scales(), *b.scales(), *of_sides[0], *of_sides[1], constant, *written


def multiply(sides: tuple[Side, Side], height: int, summed: int, factors: Factors, target: tuple) -> None:
    """out = a b^T, see `common`."""
    spec = one_product(tuple(side.kind for side in sides), tuple(side.turned for side in sides), height)
    out: Tensor = target[-1]
    if out.is_meta:
        return record(spec)
    rows, cols = out.shape
    row_tiles, col_tiles, steps = -(-rows // height), -(-cols // COLS), -(-summed // STEP)
    tiles = (rows, row_tiles, col_tiles, -(-steps // 2), -(-steps // 2), 1, BAND, 0, 0)
    grid = (min(row_tiles * col_tiles, multiprocessors(out.get_device())), 1)
    launch(spec, out, grid, (*common(sides, height, factors, target), steps, 0, *tiles))
