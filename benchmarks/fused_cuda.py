"""What does computing in front of a quantizer save? Fused kernels beside activation and quantizer one after the other.

    python benchmarks/fused_cuda.py --out benchmarks/results

Bytes are what the fused kernel must move: its inputs once, every output once. The copy beside it moves the same
number, half read and half written. "ours" is the activation as an op of te_dist and the same quantizer; "compiled" the
activation by torch.compile and the same quantizer. The L2 cache is flushed before every launch; medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.quantize_cuda import direction, empty
from benchmarks.report import Report, number, text
from benchmarks.timing import copy_time, median_time
from te_dist import ops
from te_dist.ops.panel_sums import column_sums
from te_dist.ops.source import Gathered, RmsNorm, Source, Summed, SwiGlu, SwiGluGradient, row_sums_shape, sums_shape

SHAPES = ((16384, 7168), (8192, 2048))
EPS = 1e-5


@dataclass(frozen=True)
class Row:
    """A line of the table: microseconds, and ratios of the others' time to the fused kernel's."""

    shape: str
    front: str
    quantizer: str
    directions: str
    bytes_per_element: float
    fused: float
    copy: float
    ours: float
    compiled: float


@dataclass(frozen=True)
class Front:
    """What is computed in front: the source, torch's function of the same, and bytes that are read for an output."""

    name: str
    source: Source | Tensor
    plain: Callable[[], Tensor]
    read: float


def swiglu(x: Tensor) -> Tensor:
    """In fp32, rounded once, as the fused kernel does it."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """The same of its gradient."""
    gate, up, wide = *x.float().chunk(2, dim=-1), grad.float()
    s = torch.sigmoid(gate)
    return torch.cat([wide * up * (s * (1 + gate * (1 - s))), wide * gate * s], -1).to(x.dtype)


def weighted_gradient(x: Tensor, grad: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """Of that times a probability of each row, and that of the probability."""
    gate, up = x.float().chunk(2, dim=-1)
    return swiglu_gradient(x, grad * probability[:, None]), (grad * F.silu(gate) * up).sum(1)


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    """The norm whole: what is fused in front is found by a kernel of its own, which is timed with it."""
    return F.rms_norm(x.float(), gamma.shape, gamma, EPS).to(x.dtype)


def fronts(rows: int, cols: int) -> Iterator[Front]:
    """Everything that can stand in front, for (rows, cols) quantized."""
    randn = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x = randn(rows, 2 * cols)
    compiled = torch.compile(swiglu)
    yield Front("SwiGLU", SwiGlu(x), lambda: compiled(x), 4)
    x, grad = randn(rows, cols), randn(rows, cols // 2)
    compiled_gradient = torch.compile(swiglu_gradient)
    yield Front("SwiGLU gradient", SwiGluGradient(x, grad), lambda: compiled_gradient(x, grad), 3)
    probability, sums = torch.rand(rows, device="cuda"), empty(*row_sums_shape(grad), dtype=torch.float32)
    compiled_weighted = torch.compile(weighted_gradient)
    source = SwiGluGradient(x, grad, probability, sums)
    yield Front("SwiGLU gradient, and of probabilities", source, lambda: compiled_weighted(x, grad, probability)[0], 3)
    index = torch.randperm(rows, device="cuda")
    yield Front("gathered rows", Gathered(x, index), lambda: x[index], 2)
    gamma, rstd = torch.randn(cols, device="cuda"), torch.empty(rows, device="cuda")
    compiled_norm = torch.compile(rms_norm)
    yield Front("RMSNorm", RmsNorm(x, rstd, gamma), lambda: compiled_norm(x, gamma), 4)


def quantizers(shape: tuple[int, int]) -> Iterator[tuple[str, str, Callable[[Source | Tensor], None], int]]:
    """Name, directions, call, bytes written."""
    rows, cols = shape
    scale, amax = torch.ones(1, device="cuda"), torch.full((1, 1), 6.0, device="cuda")
    rules = {
        "per-tensor, known scale": (None, 128, {}),
        "block 1x128": (ops.quantize_float8_block, 128, dict(fp8="e4m3", pow2=False, eps=0.0)),
        "MXFP8": (ops.quantize_mxfp8, 32, dict(fp8="e4m3")),
        "NVFP4": (ops.quantize_nvfp4, 16, dict(e4m3_max=448, four_over_six="none", rng_state=None)),
    }
    for name, (op, length, rule) in rules.items():
        for directions in (("row",), ("row", "col")):
            planes: dict = {}
            for side in directions:
                planes |= direction(side, shape, length, False)
                if length == 16:
                    planes[f"{side}_tensor_amax"] = amax
            if op is None:
                planes = {f"{side}_data": planes[f"{side}_data"] for side in directions}
            nbytes = sum(p.nbytes for key, p in planes.items() if key.endswith(("data", "scale")))

            def call(x: Source | Tensor, op=op, rule=rule, planes=planes) -> None:
                if op is None:
                    ops.quantize_float8_tensor(x, scale, fp8="e4m3", **planes)
                else:
                    op(x, phase=(0, 0), **rule, **planes)

            yield name, " and ".join(directions), call, nbytes


def measure(repeats: int) -> Iterator[Row]:
    """All lines."""
    for rows, cols in SHAPES:
        shape, count = f"{rows} x {cols}", rows * cols
        for front in fronts(rows, cols):
            values = empty(rows, cols, dtype=torch.bfloat16)
            for name, directions, call, written in quantizers((rows, cols)):

                def fused(call=call, front=front) -> None:
                    if isinstance(front.source, RmsNorm):
                        ops.rms_rstd(front.source.x, eps=EPS, out=front.source.rstd)
                    call(front.source)

                def ours(call=call, front=front, values=values) -> None:
                    if isinstance(front.source, RmsNorm):
                        ops.rms_rstd(front.source.x, eps=EPS, out=front.source.rstd)
                    ops.evaluate(front.source, out=values)
                    call(values)

                def compiled(call=call, front=front) -> None:
                    call(front.plain())

                nbytes = int(front.read * count) + written
                times = (median_time(run, repeats) for run in (fused, ours, compiled))
                yield Row(
                    shape, front.name, name, directions, nbytes / count, next(times), copy_time(nbytes, repeats), *times
                )
        yield from bias_gradients(rows, cols, repeats)


def bias_gradients(rows: int, cols: int, repeats: int) -> Iterator[Row]:
    """Sums of columns beside the codes; the others sum in a pass of their own, "compiled" as torch does."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    sums = empty(*sums_shape(x), dtype=torch.float32)
    for name, directions, call, written in quantizers((rows, cols)):

        def fused(call=call) -> None:
            call(Summed(x, sums))
            column_sums(sums)

        def ours(call=call) -> None:
            call(x)
            ops.panel_sums(x, out=sums)
            column_sums(sums)

        def torchs(call=call) -> None:
            call(x)
            x.sum(0, dtype=torch.float32)

        nbytes = 2 * x.numel() + written
        times = (median_time(run, repeats) for run in (fused, ours, torchs))
        shape = f"{rows} x {cols}"
        per_element, first, copy = nbytes / x.numel(), next(times), copy_time(nbytes, repeats)
        yield Row(shape, "bias gradient", name, directions, per_element, first, copy, *times)


REPORT = Report(
    "fused_cuda",
    "Fused CUDA quantizers",
    "bf16 in, cold L2, medians in microseconds. `copy`, `ours` and `compiled` are divided by `fused`.",
    {
        "shape": text("shape"),
        "in front": text("front"),
        "quantizer": text("quantizer"),
        "directions": text("directions"),
        "bytes/element": number("bytes_per_element", 2),
        "fused us": number("fused", 1),
        **{
            name: lambda row, name=name: f"{getattr(row, name) / row.fused:.2f}"
            for name in ("copy", "ours", "compiled")
        },
    },
)


def main(out: Path | None = None, repeats: int = 31) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    REPORT.publish(measure(repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
