"""Operands of products in groups, and their values in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from te_dist import ops

SQUARE, RUN = (128, 128), (1, 128)
# Tensor cores cut every product off 13 bits behind the point of the largest, in sums of 32; of sums fp32 keeps more.
RELATIVE_ERROR = 2.0**-11
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# Ragged and empty groups, one group, more groups than lanes of a warp, more than a thousand.
SIZES = {
    "aligned": [128, 256, 128],
    "ragged": [0, 5, 0, 300, 1, 64, 0],
    "one": [700],
    "skewed": [1, 2000, 3],
    "none": [0, 0, 0],
    "many": [3, 0, 70, 1] * 300,
}


def group_ends(sizes: Sequence[int]) -> Tensor:
    """Where groups of these sizes end."""
    return torch.tensor(sizes).cumsum(0)


def table_of(sizes: Sequence[int], rows: int, device: str = "cpu") -> Tensor:
    """The group table of a matrix of `rows`."""
    table = torch.full((4, len(sizes) + 1), -1, dtype=torch.int32, device=device)
    ops.group_table(group_ends(sizes).to(device), rows=rows, out=table)
    return table


def check_product(got: Tensor, want: Tensor, size: Tensor, name: str) -> None:
    """`want`, in float64, up to what tensor cores make of products whose magnitudes sum up to `size`."""
    wrong = ~((got.double() - want).abs() <= RELATIVE_ERROR * size + ROUNDING[got.dtype] * want.abs())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values of {name} are off, first at {wrong.nonzero()[0].tolist()}"
    )


class Operand:
    """Codes (groups * rows, K) with their scales, laid out as fields are: padding holds NaN, which must not matter."""

    def __init__(  # noqa: PLR0913  (each is one property of the operand)
        self,
        rows: int,
        depth: int,
        tile: tuple[int, int],
        *,
        seed: int,
        groups: int = 1,
        fp8: str = "e4m3",
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        draw = lambda *shape: torch.rand(shape, generator=generator, device=device)  # noqa: E731
        self.fp8, self.tile, self.groups, self.rows = fp8, tile, groups, rows
        self.codes = draw(groups * rows, depth).sub_(0.5).mul_(8).to(FP8[fp8]).view(torch.uint8)
        depth_tiles = -(-depth // 128)
        self.grid = grid = (depth_tiles, rows) if tile == RUN else (-(-rows // 128), depth_tiles)
        self.scale = torch.full((groups * grid[0], -(-grid[1] // 4) * 4), torch.nan, device=device)
        self.scale[:, : grid[1]] = torch.exp2(4 * draw(groups * grid[0], grid[1]) - 2)

    @cached_property
    def values(self) -> Tensor:
        """(groups * rows, K) in float64: eight times the memory of the codes."""
        by_row = []
        for cells in self.scale[:, : self.grid[1]].chunk(self.groups):
            by_row.append(cells.t() if self.tile == RUN else cells.repeat_interleave(128, 0)[: self.rows])
        scales = torch.cat(by_row).repeat_interleave(128, 1)[:, : self.codes.shape[1]]
        return self.codes.view(FP8[self.fp8]).double() * scales.double()

    def turned(self) -> tuple[Tensor, Tensor]:
        """The same codes (groups * K, rows) and scales of squares; padding holds NaN."""
        codes = torch.cat([its.t() for its in self.codes.chunk(self.groups)]).contiguous()
        rows, depth_tiles = self.grid
        scale = self.scale.new_full((self.groups * depth_tiles, -(-rows // 4) * 4), torch.nan)
        scale[:, :rows] = torch.cat([its[:, :depth_tiles].t() for its in self.scale.chunk(self.groups)])
        return codes, scale
