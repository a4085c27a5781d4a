"""Products in groups beside other libraries: TFLOP/s of real rows on one GPU.

    python -m benchmarks.grouped_cuda --out benchmarks/results
    python -m benchmarks.grouped_cuda --tilings

FP8 blocks, FP8 with one scale, and bf16, forward and backward. Groups of equal size on average: multiples of 128 rows,
ragged, skewed (Zipf), and with a tenth of them empty. Random codes, cold L2, medians. Peers that are not installed, and
sizes that a peer does not take, are left out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.gemm_cuda import PEER, TILINGS, fits, label, random_codes, random_scales
from benchmarks.report import Report, number, text
from benchmarks.timing import median_time
from te_dist import ops
from te_dist.kernels import grouped_gemm, grouped_whole
from te_dist.kernels.grouped_whole import Operand, Split, whole
from te_dist.kernels.runtime import prepare
from te_dist.ops.gemm_decoded import Coded

# (groups, rows of all, N, K), see the shapes of common mixtures of experts.
SHAPES = (
    (8, 32768, 4096, 7168),
    (8, 32768, 7168, 2048),
    (4, 32768, 6144, 7168),
    (128, 65536, 1536, 2048),
    (128, 65536, 2048, 768),
    (32, 32768, 4096, 2048),
)
ROUTINGS = ("aligned", "ragged", "zipf", "empty")
SQUARE, RUN = (128, 128), (1, 128)
# What `grouped_whole` may choose from.
SPLITS = [Split(*split) for split in product((256, 128), (2, 1), (8, 16))]
Calls = dict[tuple[str, str], Callable[[], object]]  # by product and library


@dataclass(frozen=True)
class Row:
    """A line of the table. Times in microseconds."""

    shape: str
    routing: str
    product: str
    library: str
    time: float
    tflops: float


def group_sizes(routing: str, groups: int, rows: int) -> list[int]:
    """Rows of each group, `rows` in all at most."""
    random = np.random.default_rng(0)
    weights = {"zipf": 1 / np.arange(1, groups + 1), "empty": random.uniform(0.5, 1.5, groups)}.get(routing)
    if weights is None:
        weights = random.uniform(0.7, 1.3, groups)
    if routing == "empty":
        weights[random.permutation(groups)[: max(1, groups // 10)]] = 0
    sizes = np.floor(weights / weights.sum() * rows).astype(int)
    return [int(size) // 128 * 128 if routing == "aligned" else int(size) for size in sizes]


@dataclass(frozen=True)
class Groups:
    """Operands of the products of one layer: forward, and the gradient of its weights, which sums over rows."""

    sizes: list[int]
    table: Tensor
    x: Tensor  # (T, K) codes
    x_scale: Tensor
    weight: Tensor  # (G * N, K)
    weight_scale: Tensor
    dy_t: Tensor  # (N, P)
    dy_t_scale: Tensor
    x_t: Tensor  # (K, P)
    x_t_scale: Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int, int], sizes: list[int]) -> Groups:
        groups, rows, cols, depth = shape
        ends = torch.tensor(sizes, device="cuda").cumsum(0)
        table = torch.empty(4, groups + 1, dtype=torch.int32, device="cuda")
        ops.group_table(ends, rows=rows, out=table)
        padded = 128 * (rows // 128 + groups)
        return cls(
            sizes,
            table,
            random_codes(rows, depth),
            random_scales(depth // 128, rows),
            random_codes(groups * cols, depth),
            random_scales(groups * cols // 128, -(-depth // 512) * 4),  # rows of whole 16 bytes
            random_codes(cols, padded),
            random_scales(padded // 128, cols),
            random_codes(depth, padded),
            random_scales(padded // 128, depth),
        )

    @property
    def cols(self) -> int:
        """N"""
        return self.dy_t.shape[0]

    def forward(self, out: Tensor) -> Callable[[], None]:
        rest = dict(b_tile=SQUARE, fp8=("e4m3", "e4m3"), bias=None, row_factor=None, accumulate=False)
        operands = (self.x, self.x_scale, self.weight, self.weight_scale)
        return lambda: ops.grouped_gemm_float8_block(*operands, table=self.table, out=out, **rest)

    def forward_one_scale(self, out: Tensor) -> Callable[[], None]:
        rest = dict(fp8=("e4m3", "e4m3"), bias=None, row_factor=None, accumulate=False)
        operands = (self.x, self.x_scale[0, :1], self.weight, self.weight_scale[0, :1])
        return lambda: ops.grouped_gemm_float8_tensor(*operands, table=self.table, out=out, **rest)

    def wgrad_one_scale(self, out: Tensor) -> Callable[[], None]:
        operands = (self.dy_t, self.dy_t_scale[0, :1], self.x_t, self.x_t_scale[0, :1])
        rest = dict(table=self.table, fp8=("e4m3", "e4m3"), accumulate=False)
        return lambda: ops.grouped_wgrad_float8_tensor(*operands, out=out, **rest)

    def wgrad(self, out: Tensor, *, accumulate: bool) -> Callable[[], None]:
        operands = (self.dy_t, self.dy_t_scale, self.x_t, self.x_t_scale)
        rest = dict(table=self.table, fp8=("e4m3", "e4m3"), accumulate=accumulate)
        return lambda: ops.grouped_wgrad_float8_block(*operands, out=out, **rest)


def halves(data: Groups, half: Tensor) -> Calls:
    """Products of bf16; `half` is what a gradient of the weights is written to."""
    rows, cols, groups, depth = sum(data.sizes), data.cols, len(data.sizes), data.x.shape[1]
    ends = data.table[0, 1:].contiguous()
    x, dy = (torch.randn(rows, extent, device="cuda", dtype=torch.bfloat16) for extent in (depth, cols))
    weight = torch.randn(groups, cols, depth, device="cuda", dtype=torch.bfloat16)
    out, dx, flat = torch.empty_like(dy), torch.empty_like(x), weight.view(-1, depth)
    rest = dict(table=data.table, bias=None, row_factor=None, accumulate=False)
    sums = dict(table=data.table, accumulate=False, out=half)
    return {
        ("forward, bf16", "te_dist"): lambda: ops.grouped_gemm_half(x, flat, summed_dim=1, out=out, **rest),
        ("forward, bf16", "torch"): lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
        ("dgrad, bf16", "te_dist"): lambda: ops.grouped_gemm_half(dy, flat, summed_dim=0, out=dx, **rest),
        ("dgrad, bf16", "torch"): lambda: F.grouped_mm(dy, weight, offs=ends),
        ("wgrad, bf16", "te_dist"): lambda: ops.grouped_wgrad_half(dy, x, **sums),
        ("wgrad, bf16", "torch"): lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }


def codes(data: Groups, out: Tensor, half: Tensor) -> Calls:
    """Products of FP8 with one scale; those of torch have one for each row, of sizes that are multiples of 16."""
    calls: Calls = {
        ("forward, FP8", "te_dist"): data.forward_one_scale(out),
        ("wgrad, FP8", "te_dist"): data.wgrad_one_scale(half),
    }
    if any(size % 16 for size in data.sizes):
        return calls
    rows, groups, fp8, by_row = sum(data.sizes), len(data.sizes), torch.float8_e4m3fn, F.ScalingType.RowWise
    ends = data.table[0, 1:].contiguous()
    rest = dict(offs=ends, output_dtype=torch.bfloat16, use_fast_accum=True)
    x, weight = data.x[:rows].view(fp8), data.weight.view(fp8).view(groups, data.cols, -1).transpose(1, 2)
    dy_t, x_t = (side[:, :rows].contiguous().view(fp8) for side in (data.dy_t, data.x_t))
    ones = [torch.ones(extent, device="cuda") for extent in (rows, groups * data.cols, groups * len(x_t))]
    by_group = ones[1].view(groups, -1)
    calls["forward, FP8", "torch"] = lambda: F.scaled_grouped_mm(x, weight, ones[0], by_row, by_group, by_row, **rest)
    calls["wgrad, FP8", "torch"] = lambda: F.scaled_grouped_mm(dy_t, x_t.t(), ones[1], by_row, ones[2], by_row, **rest)
    return calls


def decoded(data: Groups, out: Tensor, grad: Tensor) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(product, library, call) of MXFP8, and of NVFP4, decoded on their way to tensor cores."""
    rows, depth, cols, groups = *data.x.shape, data.cols, len(data.sizes)
    dx = torch.empty(rows, depth, device="cuda", dtype=torch.bfloat16)
    padded = data.dy_t.shape[1]
    for name, kind in (("MXFP8", "e4m3"), ("NVFP4", "e2m1")):
        lies = functools.partial(random_coded, kind, turned=kind == "e4m3")  # by columns
        back = lies(depth, groups * cols) if kind == "e4m3" else random_coded(kind, groups * depth, cols)
        x, weight, dy = (random_coded(kind, *shape) for shape in ((rows, depth), (groups * cols, depth), (rows, cols)))
        dy_t, x_t = lies(cols, padded), lies(depth, padded)
        table = dict(table=data.table)
        yield f"{name} forward", "te_dist", functools.partial(ops.grouped_gemm_decoded, x, weight, out=out, **table)
        yield f"{name} dgrad", "te_dist", functools.partial(ops.grouped_gemm_decoded, dy, back, out=dx, **table)
        sums = functools.partial(ops.grouped_wgrad_decoded, dy_t, x_t, out=grad, accumulate=True, **table)
        yield f"{name} wgrad, fp32 added", "te_dist", sums


def random_coded(kind: str, kept: int, summed: int, *, turned: bool = False) -> Coded:
    """Random codes with scale bytes of 1."""
    grain, one = (16, 0x38) if kind == "e2m1" else (32, 127)
    codes, scale = (kept, summed // (2 if kind == "e2m1" else 1)), (kept, summed // grain)
    codes, scale = (shape[::-1] if turned else shape for shape in (codes, scale))
    drawn = random_codes(*codes), torch.full(scale, one, dtype=torch.uint8, device="cuda")
    codes, scale = (part.t() if turned else part for part in drawn)
    return Coded(codes, kind, scale, (1, grain))


def peers(data: Groups, out: Tensor, grad: Tensor) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(product, library, call) of other libraries on FP8 blocks of the same sizes."""
    rows, cols, groups = sum(data.sizes), data.cols, len(data.sizes)
    if importlib.util.find_spec(PEER) is None or any(size % 128 for size in data.sizes):
        return
    peer = importlib.import_module(PEER)
    fp8 = torch.float8_e4m3fn
    owner = torch.repeat_interleave(
        torch.arange(groups, device="cuda", dtype=torch.int32), torch.tensor(data.sizes).cuda()
    )
    a = (data.x[:rows].view(fp8), data.x_scale[:, :rows].t())
    scales = data.weight_scale[:, : data.x.shape[1] // 128].contiguous()
    b = (data.weight.view(fp8).view(groups, cols, -1), scales.view(groups, cols // 128, -1))
    yield (
        "forward, blocks",
        "DeepGEMM",
        lambda: peer.m_grouped_fp8_gemm_nt_contiguous(a, b, out[:rows], owner, disable_ue8m0_cast=True),
    )
    ks = torch.tensor(data.sizes, device="cuda", dtype=torch.int32)
    flat = [
        (codes[:, :rows].reshape(-1).view(fp8), scale[: rows // 128].contiguous().t())
        for codes, scale in ((data.dy_t, data.dy_t_scale), (data.x_t, data.x_t_scale))
    ]
    total = grad.view(groups, cols, -1)
    yield (
        "wgrad, blocks, fp32 added",
        "DeepGEMM",
        lambda: peer.k_grouped_fp8_gemm_nt_contiguous(*flat, total, data.sizes, ks, total),
    )


def measure(repeats: int) -> Iterator[Row]:
    """All lines."""
    for shape, routing in product(SHAPES, ROUTINGS):
        groups, rows, cols, depth = shape
        sizes = group_sizes(routing, groups, rows)
        data = Groups.random(shape, sizes)
        out = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
        grad = torch.zeros(groups * cols, depth, device="cuda")
        half = torch.empty_like(grad, dtype=torch.bfloat16)
        calls = [
            ("forward, blocks", "te_dist", data.forward(out)),
            ("wgrad, blocks", "te_dist", data.wgrad(half, accumulate=False)),
            ("wgrad, blocks, fp32 added", "te_dist", data.wgrad(grad, accumulate=True)),
            *decoded(data, out, grad),
            *peers(data, out, grad),
            *((*names, call) for names, call in (halves(data, half) | codes(data, out, half)).items()),
        ]
        for name, library, call in calls:
            time = median_time(call, repeats)
            yield Row(str(shape), routing, name, library, time, 2 * sum(sizes) * cols * depth / time / 1e6)


def sweep_blocks(repeats: int) -> None:
    """Prints TFLOP/s of every tiling of FP8 blocks."""
    for shape, routing in product(SHAPES, ("aligned", "ragged")):
        groups, rows, cols, depth = shape
        sizes = group_sizes(routing, groups, rows)
        data = Groups.random(shape, sizes)
        out = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
        grad = torch.zeros(groups * cols, depth, device="cuda")
        calls = {
            "forward": data.forward(out),
            "wgrad bf16": data.wgrad(torch.empty_like(grad, dtype=torch.bfloat16), accumulate=False),
            "wgrad fp32": data.wgrad(grad, accumulate=True),
        }
        for name, call in calls.items():
            found = []
            for tiling in TILINGS:
                if fits(tiling, square=name == "forward", adds=name == "wgrad fp32"):
                    choose = lambda *_, its=tiling: its  # noqa: E731
                    with mock.patch.multiple(grouped_gemm, rows_tiling=choose, sums_tiling=choose):
                        time = median_time(call, repeats)
                    found.append(f"{label(tiling)} {2 * sum(sizes) * cols * depth / time / 1e6:.0f}")
            print(shape, routing, name, *found, sep="  ", flush=True)


def sweep_whole(repeats: int, routing: str) -> None:
    """Prints TFLOP/s of every split, beside torch, where tensor cores sum alone."""
    half, turned, code = Operand("BFloat16"), Operand("BFloat16", turned=True), Operand("E4M3")
    rows, sums = ((half, half), (half, turned), (code, code)), ((turned, turned), (code, code))
    specs = [whole(pair, "BFloat16", split) for pair, split in product(rows, SPLITS)]
    prepare([*specs, *(whole(pair, "BFloat16", split, sums=True) for pair, split in product(sums, SPLITS))], 0)
    for shape in SHAPES:
        groups, all_rows, cols, depth = shape
        sizes = group_sizes(routing, groups, all_rows)
        data = Groups.random(shape, sizes)
        out = torch.empty(all_rows, cols, device="cuda", dtype=torch.bfloat16)
        grad = torch.empty(groups * cols, depth, device="cuda", dtype=torch.bfloat16)
        for (name, library), call in (halves(data, grad) | codes(data, out, grad)).items():
            found = []
            for split in SPLITS if library == "te_dist" else [None]:
                choice = mock.Mock(return_value=split)
                with mock.patch.multiple(grouped_whole, products_split=choice, sums_split=choice):
                    tflops = 2 * sum(sizes) * cols * depth / median_time(call, repeats) / 1e6
                found.append(f"{split.cols}/{split.cluster}/{split.band} {tflops:.0f}" if split else f"{tflops:.0f}")
            print(shape, name, library, *found, sep="  ", flush=True)


REPORT = Report(
    "grouped_cuda",
    "Products in groups",
    "Cold L2, medians; real rows count.",
    {
        "G, T, N, K": text("shape"),
        "groups": text("routing"),
        "product": text("product"),
        "library": text("library"),
        "us": number("time", 1),
        "TFLOP/s": number("tflops"),
    },
)


def main(out: Path | None = None, repeats: int = 21, tilings: bool = False) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`. With `tilings` prints what each of them reaches."""
    if tilings:
        sweep_blocks(repeats)
        return sweep_whole(repeats, "aligned")
    REPORT.publish(measure(repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
