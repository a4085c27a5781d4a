"""Products in groups as they are measured: shapes, sizes of groups, operands, and the calls of te_dist's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.gemm_cuda import random_codes, random_scales
from te_dist import ops
from te_dist.kernels.runtime import recording
from te_dist.kernels.spec import Spec
from te_dist.ops.gemm_decoded import Coded
from te_dist.ops.group_table import padded_rows

Shape = tuple[int, int, int, int]  # groups, rows of all, N, K
Call = Callable[[], object]
Routing = Literal["aligned", "ragged", "zipf-aligned", "zipf", "empty-aligned", "empty"]
Leg = Literal["fprop", "dgrad", "wgrad", "wgrad-added"]  # a gradient of weights is stored in bf16, or added to fp32
Kind = Literal["blocks", "fp8", "bf16", "mxfp8", "nvfp4"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
LEGS: tuple[Leg, ...] = get_args(Leg)
KINDS: tuple[Kind, ...] = get_args(Kind)

SHAPES: tuple[Shape, ...] = (  # of common mixtures of experts
    (8, 32768, 4096, 7168),
    (8, 32768, 7168, 2048),
    (4, 32768, 6144, 7168),
    (128, 65536, 1536, 2048),
    (128, 65536, 2048, 768),
    (32, 32768, 4096, 2048),
)
SQUARE, RUN, TILE = (128, 128), (1, 128), 128
FP8 = ("e4m3", "e4m3")
_SCALES_OF_16_BYTES = 4


def num_empty(groups: int) -> int:
    """A tenth of so many groups: 1 of 8, 3 of 32, 13 of 128, none of 4."""
    return round(groups / 10)


def group_sizes(routing: Routing, groups: int, rows: int) -> list[int]:
    """Rows of each group, `rows` in all at most; even up to 30 % of the mean, skewed, or with a tenth empty."""
    random = np.random.default_rng(0)
    kind, _, aligned = routing.partition("-")
    weights = {"zipf": 1 / np.arange(1, groups + 1), "empty": random.uniform(0.5, 1.5, groups)}.get(kind)
    if weights is None:
        weights = random.uniform(0.7, 1.3, groups)
    if kind == "empty":
        weights[random.permutation(groups)[: num_empty(groups)]] = 0
    sizes = np.floor(weights / weights.sum() * rows).astype(int)
    return [int(size) // TILE * TILE if "aligned" in (kind, aligned) else int(size) for size in sizes]


@dataclass(frozen=True)
class Problem:
    """A layer and the sizes of its groups, which end before the rows of all do as a rule."""

    shape: Shape
    sizes: list[int]
    device: str = "cuda"

    @property
    def groups(self) -> int:
        """G"""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """T, room for rows."""
        return self.shape[1]

    @property
    def real_rows(self) -> int:
        """Rows that are somebody's."""
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        """Of every leg, real rows counted."""
        return 2 * self.real_rows * self.shape[2] * self.shape[3]

    @property
    def padded(self) -> int:
        """Rows of what sums over them, every group in whole tiles."""
        return padded_rows(self.rows, self.groups)

    @cached_property
    def table(self) -> Tensor:
        """See `ops.group_table`."""
        ends = torch.tensor(self.sizes, device=self.device).cumsum(0)
        table = torch.empty(4, self.groups + 1, dtype=torch.int32, device=self.device)
        ops.group_table(ends, rows=self.rows, out=table)
        return table

    @property
    def ends(self) -> Tensor:
        """int32 (G,), as torch takes it."""
        return self.table[0, 1:].contiguous()

    def extents(self, leg: Leg) -> tuple[int, int]:
        """(kept, summed) of a matrix of a group; of a gradient of weights (N, K)."""
        cols, depth = self.shape[2:]
        return (depth, cols) if leg == "dgrad" else (cols, depth)

    def parts(self) -> list[tuple[int, slice]]:
        """Groups that have rows, and which."""
        ends = np.cumsum(self.sizes)
        spans = zip(self.sizes, ends, strict=True)
        return [(group, slice(int(end) - size, int(end))) for group, (size, end) in enumerate(spans) if size]

    def out(self, leg: Leg) -> Tensor:
        """Where a product of this leg goes: (T, kept), or (G * N, K)."""
        kept, other = self.extents(leg)
        if not sums(leg):
            return torch.empty(self.rows, kept, device=self.device, dtype=torch.bfloat16)
        dtype = torch.float32 if leg == "wgrad-added" else torch.bfloat16
        return torch.zeros(self.groups * kept, other, device=self.device, dtype=dtype)

    def codes(self, *shape: int) -> Tensor:
        """Random ones; zeros would draw less power."""
        return random_codes(*shape, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        """Near 1."""
        return random_scales(*shape, device=self.device)

    def halves(self, *shape: int) -> Tensor:
        """Random bf16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def sums(leg: Leg) -> bool:
    """Whether a leg sums over rows."""
    return leg in ("wgrad", "wgrad-added")


class Fp8(NamedTuple):
    """Codes and scales of both sides of a product: rows and matrices, or two sides that are summed over padded rows."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor


def blocks(problem: Problem, leg: Leg) -> Fp8:
    """FP8 with fp32 scales: 1 x 128 by 128 x 128, or 1 x 128 by 1 x 128 of what is summed over rows."""
    (kept, other), rows, groups, padded = problem.extents(leg), problem.rows, problem.groups, problem.padded
    if sums(leg):
        sides = ((problem.codes(extent, padded), problem.scales(padded // TILE, extent)) for extent in (kept, other))
        return Fp8(*(part for side in sides for part in side))
    depth_tiles = -(-other // TILE)
    pitch = -(-depth_tiles // _SCALES_OF_16_BYTES) * _SCALES_OF_16_BYTES
    a, b = problem.codes(rows, other), problem.codes(groups * kept, other)
    return Fp8(a, problem.scales(depth_tiles, rows), b, problem.scales(groups * -(-kept // TILE), pitch))


def whole(problem: Problem, leg: Leg) -> Fp8:
    """FP8 with one scale for each side."""
    kept, other = problem.extents(leg)
    a, b = (kept, problem.padded), (other, problem.padded)
    if not sums(leg):
        a, b = (problem.rows, other), (problem.groups * kept, other)
    return Fp8(problem.codes(*a), problem.scales(1), problem.codes(*b), problem.scales(1))


class Halves(NamedTuple):
    """bf16 (T, .) and the matrices (G, N, K), or the other side, (T, K)."""

    a: Tensor
    b: Tensor


def halves(problem: Problem, leg: Leg) -> Halves:
    """Operands as they lie: the same matrices for dgrad as for fprop."""
    rows, (cols, depth) = problem.rows, problem.shape[2:]
    a = problem.halves(rows, depth if leg == "fprop" else cols)
    return Halves(a, problem.halves(rows, depth) if sums(leg) else problem.halves(problem.groups, cols, depth))


def ours(problem: Problem, leg: Leg, kind: Kind) -> Call:
    """te_dist's op of one leg; its result is the keyword `out`."""
    return {"blocks": _blocks, "fp8": _whole, "bf16": _halves, "mxfp8": _decoded, "nvfp4": _decoded}[kind](
        problem, leg, kind
    )


def kernels(shape: Shape, leg: Leg, kind: Kind) -> list[Spec]:
    """What te_dist's op launches, so that it can be compiled beforehand."""
    call = ours(unsized(shape), leg, kind)
    with recording() as specs:
        call()
    return specs


def unsized(shape: Shape) -> Problem:
    """One without values, for its kernels."""
    return Problem(shape, [0] * shape[0], device="meta")


def _sums_rest(problem: Problem, leg: Leg) -> dict[str, object]:
    """Keywords of all ops that sum over rows."""
    return {"table": problem.table, "accumulate": leg == "wgrad-added", "out": problem.out(leg)}


def _rows_rest(problem: Problem, leg: Leg) -> dict[str, object]:
    """Keywords of all ops on rows."""
    return {
        "table": problem.table,
        "bias": None,
        "row_factor": None,
        "accumulate": False,
        "out": problem.out(leg),
    }


def _blocks(problem: Problem, leg: Leg, _: Kind) -> Call:
    operands = blocks(problem, leg)
    if sums(leg):
        return partial(ops.grouped_wgrad_float8_block, *operands, fp8=FP8, **_sums_rest(problem, leg))
    return partial(
        ops.grouped_gemm_float8_block, *operands, summed_dim=1, b_tile=SQUARE, fp8=FP8, **_rows_rest(problem, leg)
    )


def rowwise_blocks(problem: Problem, leg: Leg, *, turns: bool) -> Call | None:
    """Gradient of rows by weights stored for forward products alone: turned by the kernel, or transposed first."""
    if leg != "dgrad":
        return None
    (kept, summed), groups = problem.extents(leg), problem.groups
    rows, weights = blocks(problem, leg), blocks(problem, "fprop")
    rest = dict(b_tile=SQUARE, fp8=FP8, **_rows_rest(problem, leg))
    multiply = partial(ops.grouped_gemm_float8_block, rows.a, rows.a_scale, **rest)
    if turns:
        return partial(multiply, weights.b, weights.b_scale, summed_dim=0)
    matrices, turned = weights.b.view(groups, summed, kept), rows.b.view(groups, kept, summed)

    def transpose_and_multiply() -> None:
        ops.transpose(matrices, bits=8, out=turned)
        multiply(rows.b, rows.b_scale, summed_dim=1)

    return transpose_and_multiply


def _whole(problem: Problem, leg: Leg, _: Kind) -> Call:
    operands = whole(problem, leg)
    if sums(leg):
        return partial(ops.grouped_wgrad_float8_tensor, *operands, fp8=FP8, **_sums_rest(problem, leg))
    rest = dict(fp8=FP8, fast=leg == "fprop", **_rows_rest(problem, leg))  # as linear maps have it
    return partial(ops.grouped_gemm_float8_tensor, *operands, **rest)


def _halves(problem: Problem, leg: Leg, _: Kind) -> Call:
    a, b = halves(problem, leg)
    if sums(leg):
        return partial(ops.grouped_wgrad_half, a, b, **_sums_rest(problem, leg))
    summed_dim = 1 if leg == "fprop" else 0
    return partial(ops.grouped_gemm_half, a, b.flatten(0, 1), summed_dim=summed_dim, **_rows_rest(problem, leg))


def _decoded(problem: Problem, leg: Leg, kind: Kind) -> Call:
    """MXFP8 by columns lies in the order of rows, NVFP4 transposed."""
    (kept, other), rows, groups = problem.extents(leg), problem.rows, problem.groups
    lies = partial(coded, problem, kind)
    by_columns = partial(lies, turned=kind == "mxfp8")
    if sums(leg):
        sides = (by_columns(extent, problem.padded) for extent in (kept, other))
        return partial(ops.grouped_wgrad_decoded, *sides, **_sums_rest(problem, leg))
    if leg == "dgrad" and kind == "mxfp8":
        return partial(
            ops.grouped_gemm_decoded, lies(rows, other), by_columns(kept, groups * other), **_rows_rest(problem, leg)
        )
    return partial(ops.grouped_gemm_decoded, lies(rows, other), lies(groups * kept, other), **_rows_rest(problem, leg))


def coded(problem: Problem, kind: Kind, kept: int, summed: int, *, turned: bool = False) -> Coded:
    """Random codes with scale bytes of 1."""
    element, packed, grain, one = ("e2m1", 2, 16, 0x38) if kind == "nvfp4" else ("e4m3", 1, 32, 127)
    shapes = (kept, summed // packed), (kept, summed // grain)
    codes_shape, scale_shape = (shape[::-1] if turned else shape for shape in shapes)
    drawn = problem.codes(*codes_shape), torch.full(scale_shape, one, dtype=torch.uint8, device=problem.device)
    codes, scale = (part.t() if turned else part for part in drawn)
    return Coded(codes, element, scale, (1, grain))
