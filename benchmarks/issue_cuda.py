"""How long does the CPU take to hand over a small pass of a Linear or a GroupedLinear, or a bare op on groups?

    python -m benchmarks.issue_cuda --out benchmarks/results

The GPU is idle when a call begins, and small enough work to be done by the next. Medians and minima of many calls in
two rounds that walk over all lines; torch's bf16 Linear is a line among them. Wanted: less than 250 us for a Linear of
512 in FP8 blocks, 400 us for a GroupedLinear with one weight, 15 us for an op, whatever the number of groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import te_dist as te
from benchmarks.grouped_linear_cuda import Layer, module_pass
from benchmarks.linear_cuda import RECIPES, passes
from benchmarks.report import Report, number, text
from te_dist import ops

WIDTH, ROWS = 512, 4096
GROUPS = (8, 128)
CALLS, TOGETHER = 200, 20  # calls of a round, and how many are handed over before the GPU is waited for
ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """A line: microseconds of CPU time of one call; of its rounds, the lowest median."""

    what: str
    median: float
    lowest: float


def linears() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of torch's Linear, and of te_dist's in every recipe."""
    x = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"bias": False, "device": "cuda"}
    yield "torch's Linear, bf16", passes(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, **options), x, None)
    for name, made_by in RECIPES.items():
        for is_quantized in (False, True):
            with te.quantized_model_init(enabled=is_quantized, recipe=made_by):
                module = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, **options)
            yield f"Linear, {name}, {'quantized' if is_quantized else 'plain'}", passes(module, x, made_by)


def grouped_linears() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of a GroupedLinear in FP8 blocks: one weight, or one for each group."""
    for groups in GROUPS:
        layer = Layer.of((groups, ROWS, WIDTH, WIDTH), "ragged")
        for weights in ("quantized", "quantized, each"):
            yield f"GroupedLinear, {groups} groups, {weights}", module_pass(layer, RECIPES["block"], weights)


def bare_ops() -> Iterator[tuple[str, Callable[[], object]]]:
    """The table of groups, and a product of FP8 blocks."""
    for groups in GROUPS:
        sizes = torch.full((groups,), ROWS // groups, device="cuda")
        table = torch.empty(4, groups + 1, dtype=torch.int32, device="cuda")
        ops.group_table(sizes, rows=ROWS, out=table, are_sizes=True)
        yield f"ops.group_table, {groups} groups", Table(sizes, table)
        yield f"ops.grouped_gemm_float8_block, {groups} groups", Product(groups, table)


@dataclass(frozen=True)
class Table:
    """A call of `ops.group_table`."""

    sizes: Tensor
    table: Tensor

    def __call__(self) -> None:
        """Calls it."""
        ops.group_table(self.sizes, rows=ROWS, out=self.table, are_sizes=True)


class Product:
    """A call of `ops.grouped_gemm_float8_block`."""

    def __init__(self, groups: int, table: Tensor) -> None:
        tiles, options = WIDTH // 128, {"device": "cuda"}
        codes = [torch.randint(100, (rows, WIDTH), dtype=torch.uint8, **options) for rows in (ROWS, groups * WIDTH)]
        scales = torch.ones(tiles, ROWS, **options), torch.ones(groups * tiles, tiles, **options)
        self.operands = codes[0], scales[0], codes[1], scales[1]
        self.table, self.out = table, torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, **options)

    def __call__(self) -> None:
        """Calls it."""
        ops.grouped_gemm_float8_block(
            *self.operands,
            table=self.table,
            b_tile=(128, 128),
            fp8=("e4m3", "e4m3"),
            bias=None,
            row_factor=None,
            accumulate=False,
            out=self.out,
        )


def issue_times(call: Callable[[], object]) -> list[float]:
    """Microseconds of each of `CALLS`, in order of size."""
    for _ in range(10):
        call()
    times = []
    for number_of_call in range(CALLS):
        if number_of_call % TOGETHER == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return sorted(times)


def rows() -> Iterator[Row]:
    """All lines."""
    calls = [*linears(), *grouped_linears(), *bare_ops()]
    rounds = [[issue_times(call) for _, call in calls] for _ in range(ROUNDS)]
    for (what, _), *found in zip(calls, *rounds, strict=True):
        yield Row(what, min(times[CALLS // 2] for times in found), min(times[0] for times in found))


REPORT = Report(
    "issue_cuda",
    "CPU time to hand over small passes",
    f"Linears of {WIDTH} x {WIDTH} with {WIDTH} rows; groups of {ROWS} rows together, of the same width. Microseconds.",
    {"what": text("what"), "median": number("median", 1), "lowest": number("lowest", 1)},
)


def main(out: Path | None = None) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    REPORT.publish(rows(), out)


if __name__ == "__main__":
    tyro.cli(main)
