"""Dense products of FP8 blocks, and of FP8 with one scale, beside other libraries: TFLOP/s on one GPU.

    python -m benchmarks.gemm_cuda --out benchmarks/results

Random codes and scales (zeros would draw less power), cold L2, medians. Peers that are not installed are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from benchmarks import tilings
from benchmarks.report import Report, number, text
from benchmarks.timing import median_times
from te_dist import ops
from te_dist.kernels import gemm
from te_dist.ops.gemm_decoded import Coded

Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (8192, 4096, 7168), (8192, 7168, 2048), (16384, 1536, 2048))
# What the second of eight ranks has of 11008 features, forward and backward: its parts begin inside of tiles.
CUT = (((8192, 1376, 4096), (96, 0)), ((8192, 4096, 1376), (0, 96)))
# Gradients of small weights: (features out, features in, rows).
NARROW = ((512, 512, 65536), (768, 768, 65536), (1024, 1024, 65536), (1024, 1024, 16384), (4096, 64, 8192))
WORKSPACE_BYTES = 2**25
PEER = "deep_gemm"
TILINGS = [
    gemm.Tiling(*split, cluster, cols)
    for (*split, cols), cluster in product(((2, 1, 128), (2, 1, 192), (2, 2, 128), (3, 1, 128)), (1, 2))
] + [gemm.Tiling(3, 1, 2, band=12)]


@dataclass(frozen=True)
class Row:
    """A line of the table. Times in microseconds."""

    shape: str
    product: str
    output: str
    library: str
    time: float
    tflops: float

    @classmethod
    def of(cls, shape: Shape, product: str, output: str, *, library: str, time: float) -> Row:
        """Of a product of (M, N, K) = `shape`."""
        return cls("x".join(map(str, shape)), product, output, library, time, 2 * prod(shape) / time / 1e6)


@dataclass(frozen=True)
class Product:
    """Operands of one product: codes and scales as the field of a format lays them out."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    b_tile: tuple[int, int]
    phase: tuple[int, int] = (0, 0)

    @classmethod
    def random(cls, shape: Shape, b_tile: tuple[int, int], phase: tuple[int, int] = (0, 0)) -> Product:
        """(M, N, K) = `shape`; every code but the NaN, scales near 1."""
        rows, cols, depth = shape
        a, b = (random_codes(extent, depth) for extent in (rows, cols))
        col_tiles, depth_tiles = (-(-(at + size) // 128) for at, size in zip(phase, (cols, depth), strict=True))
        grid = (depth_tiles, cols) if b_tile[0] == 1 else (col_tiles, -(-depth_tiles // 4) * 4)
        return cls(a, b, random_scales(depth_tiles, rows), random_scales(*grid), b_tile, phase)

    def ours(self, out: Tensor, *, accumulate: bool = False) -> Callable[[], None]:
        product = dict(
            b_tile=self.b_tile, phase=self.phase, parts=1, fp8=("e4m3", "e4m3"), bias=None, accumulate=accumulate
        )
        return lambda: ops.gemm_float8_block(self.a, self.a_scale, self.b, self.b_scale, out=out, **product)

    def in_parts(self, out: Tensor, parts: int) -> Callable[[], None]:
        """Parts of the sum beside each other, and their sum."""
        below = torch.empty(parts * out.shape[0], out.shape[1], device="cuda")
        how = dict(b_tile=self.b_tile, phase=self.phase, parts=parts, fp8=("e4m3", "e4m3"), bias=None, accumulate=False)

        def call() -> None:
            ops.gemm_float8_block(self.a, self.a_scale, self.b, self.b_scale, out=below, **how)
            ops.add_parts(below, out=out)

        return call

    def deep_gemm(self, out: Tensor, *, accumulate: bool = False) -> Callable[[], None]:
        peer = importlib.import_module(PEER)
        recipe = (1, 128, 128) if self.b_tile[0] == 128 else (1, 1, 128)
        a = (self.a.view(torch.float8_e4m3fn), self.a_scale.t())
        b = (self.b.view(torch.float8_e4m3fn), self.b_scale if self.b_tile[0] == 128 else self.b_scale.t())
        c = out if accumulate else None
        return lambda: peer.fp8_gemm_nt(a, b, out, c=c, recipe=recipe, disable_ue8m0_cast=True)

    def decoded(self, out: Tensor) -> Callable[[], None]:
        """By the kernel that reads scales of any tile, at any place in it."""
        a = Coded(self.a, "e4m3", self.a_scale.t(), (1, 128), (0, self.phase[1]))
        b_scale = self.b_scale if self.b_tile[0] == 128 else self.b_scale.t()
        b = Coded(self.b, "e4m3", b_scale[:, : self.a_scale.shape[0]], self.b_tile, self.phase)
        return lambda: ops.gemm_decoded(a, b, out=out)

    def torch_bf16(self, out: Tensor) -> Callable[[], None]:
        a, b = (codes.view(torch.float8_e4m3fn).to(torch.bfloat16) for codes in (self.a, self.b))
        return lambda: torch.mm(a, b.t(), out=out)


@dataclass(frozen=True)
class WholeProduct:
    """Operands of one product with one scale each."""

    a: Tensor
    b: Tensor
    scale: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str = "cuda") -> WholeProduct:
        """(M, N, K) = `shape`."""
        rows, cols, depth = shape
        scale = torch.full((1, 1), 0.5, device=device)
        return cls(random_codes(rows, depth, device=device), random_codes(cols, depth, device=device), scale)

    def ours(self, out: Tensor, *, fast: bool, workspace: Tensor | None = None) -> Callable[[], None]:
        how = dict(fp8=("e4m3", "e4m3"), bias=None, fast=fast, accumulate=False, workspace=workspace)
        return lambda: ops.gemm_float8_tensor(self.a, self.scale, self.b, self.scale, out=out, **how)

    def torchs(self, out: Tensor, *, fast: bool) -> Callable[[], Tensor]:
        a, b = (codes.view(torch.float8_e4m3fn) for codes in (self.a, self.b))
        whole = (self.scale.view(1), ScalingType.TensorWise) * 2
        return lambda: scaled_mm(a, b.t(), *whole, output_dtype=out.dtype, use_fast_accum=fast)


def random_codes(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn).view(torch.uint8)


def random_scales(*shape: int, device: str = "cuda") -> Tensor:
    return torch.rand(shape, device=device) + 0.5


def measure(repeats: int) -> Iterator[Row]:
    """All lines."""
    has_peer = importlib.util.find_spec(PEER) is not None
    for shape in SHAPES:
        outputs = {t: torch.empty(shape[:2], device="cuda", dtype=t) for t in (torch.bfloat16, torch.float32)}
        bf16, fp32 = outputs.values()
        for b_tile in ((128, 128), (1, 128)):
            product = Product.random(shape, b_tile)
            name = f"1x128 by {b_tile[0]}x128"
            calls = {("bf16", "te_dist"): product.ours(bf16), ("bf16", "torch bf16"): product.torch_bf16(bf16)}
            if b_tile[0] == 1:
                calls["fp32", "te_dist"] = product.ours(fp32)
                calls["fp32, added", "te_dist"] = product.ours(fp32, accumulate=True)
            if has_peer and b_tile[0] == 1:  # there it has no other output
                calls["fp32, added", "DeepGEMM"] = product.deep_gemm(fp32, accumulate=True)
            elif has_peer:
                calls["bf16", "DeepGEMM"] = product.deep_gemm(bf16)
            for (output, library), time in zip(calls, median_times(list(calls.values()), repeats), strict=True):
                yield Row.of(shape, name, output, library=library, time=time)


def measure_cut(repeats: int) -> Iterator[Row]:
    """Parts of matrices that begin inside of tiles, beside others of the same shape that begin with one."""
    for shape, phase in CUT:
        out = torch.empty(shape[:2], device="cuda", dtype=torch.bfloat16)
        cut, whole = (Product.random(shape, (128, 128), its) for its in (phase, (0, 0)))
        calls = {
            (str(phase), "te_dist"): cut.ours(out),
            (str(phase), "te_dist, decoded"): cut.decoded(out),
            ("(0, 0)", "te_dist"): whole.ours(out),
            ("(0, 0)", "torch bf16"): whole.torch_bf16(out),
        }
        for (begin, library), time in zip(calls, median_times(list(calls.values()), repeats), strict=True):
            name = f"1x128 by 128x128, begins at {begin} of tiles"
            yield Row.of(shape, name, "bf16", library=library, time=time)


def measure_narrow(repeats: int) -> Iterator[Row]:
    """Sums over many rows with few outputs, in parts and at once."""
    workspace = torch.empty(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)
    for shape in NARROW:
        out = torch.empty(shape[:2], device="cuda", dtype=torch.bfloat16)
        blocks, whole = Product.random(shape, (1, 128)), WholeProduct.random(shape)
        parts = gemm.parts_of(*shape[:2], shape[2] // gemm.DEPTH, gemm.Kind(False, 2))
        calls = {
            ("1x128 by 1x128", f"te_dist, {parts} parts"): blocks.in_parts(out, parts),
            ("1x128 by 1x128", "te_dist, one sum"): blocks.ours(out),
            ("1x128 by 1x128", "torch bf16"): blocks.torch_bf16(out),
            ("one scale each", "te_dist, in a workspace"): whole.ours(out, fast=False, workspace=workspace),
            ("one scale each", "te_dist, without"): whole.ours(out, fast=False),
        }
        for (name, library), time in zip(calls, median_times(list(calls.values()), repeats), strict=True):
            yield Row.of(shape, name, "bf16", library=library, time=time)


def measure_whole(repeats: int) -> Iterator[Row]:
    """The same shapes with one scale for a matrix: summed by the tensor cores alone, as in forward, or in fp32."""
    for shape, dtype, fast in product(SHAPES, (torch.bfloat16, torch.float32), (True, False)):
        operands, out = WholeProduct.random(shape), torch.empty(shape[:2], device="cuda", dtype=dtype)
        output = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        name = f"one scale each, {'fast' if fast else 'summed in fp32'}"
        calls = {"te_dist": operands.ours(out, fast=fast), "torch": operands.torchs(out, fast=fast)}
        for library, time in zip(calls, median_times(list(calls.values()), repeats), strict=True):
            yield Row.of(shape, name, output, library=library, time=time)


def label(tiling: gemm.Tiling) -> str:
    """consumers x waves x columns / cluster, and how many tiles a band has, if not 8"""
    band = "" if tiling.band == gemm.Tiling.band else f", bands of {tiling.band}"
    return f"{tiling.consumers}x{tiling.waves}x{tiling.cols}/{tiling.cluster}{band}"


def fits(tiling: gemm.Tiling, *, square: bool, adds: bool) -> bool:
    """Whether the kernel can be cut so."""
    return tiling.cols == 128 or (square and not adds)


def sweep(repeats: int) -> Iterator[tilings.Row]:
    """A line for every tiling."""
    outputs = ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))
    for shape, b_tile, (dtype, adds) in product(SHAPES, ((128, 128), (1, 128)), outputs):
        operands, out = Product.random(shape, b_tile), torch.zeros(shape[:2], device="cuda", dtype=dtype)
        name = f"1x128 by {b_tile[0]}x128, {str(dtype).removeprefix('torch.')}{', added' * adds}"
        found = {label(its): its for its in TILINGS if fits(its, square=b_tile[0] != 1, adds=adds)}
        flops = 2 * prod(shape)
        call = operands.ours(out, accumulate=adds)
        case = tilings.Case("x".join(map(str, shape)), name, call, flops, gemm, ("tiling",), found)
        yield from case.rows(repeats)


REPORT = Report(
    "gemm_cuda",
    "Dense products of FP8",
    "Cold L2, medians, all of a product by turns. torch's products with one scale make their outputs, te_dist's are "
    "given them.",
    {
        "M x N x K": text("shape"),
        "product": text("product"),
        "output": text("output"),
        "library": text("library"),
        "us": number("time", 1),
        "TFLOP/s": number("tflops"),
    },
)


OF_TILINGS = tilings.report("gemm_tilings_cuda", "Ways to cut dense products of FP8 blocks")


def main(
    out: Path | None = None, repeats: int = 41, *, sweeps: Annotated[bool, tyro.conf.arg(name="tilings")] = False
) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`. With `tilings`, what each of them reaches."""
    if sweeps:
        return OF_TILINGS.publish(sweep(repeats), out)
    REPORT.publish(chain(measure(repeats), measure_cut(repeats), measure_narrow(repeats), measure_whole(repeats)), out)


if __name__ == "__main__":
    tyro.cli(main)
