"""Products of decoded operands beside torch's in bf16: TFLOP/s on one GPU.

    python -m benchmarks.gemm_decoded_cuda --out benchmarks/results

Random values, cold L2, medians. Ratio: time of torch.mm of the same shape in bf16 over ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.report import Report, number, text
from benchmarks.timing import median_time
from te_dist import ops
from te_dist.catalog import FORMATS
from te_dist.codecs.decoded import coded
from te_dist.codecs.gemm import Operand
from te_dist.formats import Direction, Region
from te_dist.ops.gemm_decoded import Coded
from te_dist.tensor import storage

SHAPES = ((8192, 4096, 7168), (8192, 7168, 2048), (8192, 8192, 8192))
ROW, COL = Direction.ROWWISE, Direction.COLUMNWISE
PAIRS = (
    (("mxfp8_1d", ROW), ("mxfp8_2d", ROW)),
    (("mxfp8_1d", ROW), ("mxfp8_2d", COL)),
    (("mxfp8_1d", COL), ("mxfp8_1d", COL)),
    (("nvfp4_1d", ROW), ("nvfp4_2d", ROW)),
    (("nvfp4_1d_hadamard", COL), ("nvfp4_1d_hadamard", COL)),
    (("mxfp8_1d", ROW), ("nvfp4_1d", COL)),
    (("high_precision", ROW), ("mxfp8_1d", ROW)),
    (("high_precision", ROW), ("nvfp4_2d", ROW)),
    (("high_precision", ROW), ("float8_tensorwise", ROW)),
    (("float8_block_1d", ROW), ("high_precision", COL)),
    (("float8_block_2d", ROW), ("float8_block_2d", ROW)),
    (("float8_tensorwise", ROW), ("float8_block_1d", ROW)),
)


@dataclass(frozen=True)
class Row:
    """A line of the table. Times in microseconds."""

    shape: str
    a: str
    b: str
    time: float
    tflops: float
    torch_time: float
    ratio: float


def operand(name: str, way: Direction, kept: int, summed: int) -> Coded:
    """Random values in an encoding of the catalog."""
    fmt = FORMATS[name]
    shape = (kept, summed) if way is ROW else (summed, kept)
    held = storage.quantize(torch.randn(shape, device="cuda", dtype=torch.bfloat16), fmt.select(way))
    return coded(Operand(fmt[way], held.stored(way), Region.whole(*shape), 1 if way is ROW else 0))


def measure(repeats: int) -> Iterator[Row]:
    """All lines."""
    for rows, cols, summed in SHAPES:
        out = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
        x, w = (torch.randn(extent, summed, device="cuda", dtype=torch.bfloat16) for extent in (rows, cols))
        torch_time = median_time(lambda x=x, w=w, out=out: torch.mm(x, w.t(), out=out), repeats)
        for first, second in PAIRS:
            a, b = operand(*first, rows, summed), operand(*second, cols, summed)
            time = median_time(lambda a=a, b=b, out=out: ops.gemm_decoded(a, b, out=out), repeats)
            names = (f"{name}.{way.value}" for name, way in (first, second))
            tflops = 2 * rows * cols * summed / time / 1e6
            yield Row(f"{rows}x{cols}x{summed}", *names, time, tflops, torch_time, torch_time / time)


REPORT = Report(
    "gemm_decoded_cuda",
    "Products of decoded operands",
    "bf16 out, cold L2, medians. Ratio: time of torch.mm in bf16 over ours.",
    {
        "M x N x K": text("shape"),
        "a": text("a"),
        "b": text("b"),
        "us": number("time", 1),
        "TFLOP/s": number("tflops"),
        "torch bf16 us": number("torch_time", 1),
        "ratio": number("ratio", 2),
    },
)


def main(out: Path | None = None, repeats: int = 21) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    REPORT.publish(measure(repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
