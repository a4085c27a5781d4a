"""What does a quantized Linear cost beside torch's in bf16? Forward + backward on one GPU: GPU time and CPU issue time.

    python -m benchmarks.linear_cuda --out benchmarks/results

GPU times start with a cold L2 cache and behind other work, so that the CPU is ahead. Issue times are what the CPU takes
to hand over a pass without waiting for it: alone to an idle GPU, and as one of ten in a row, as in training. Medians;
torch's Linear runs between the others, and its figure is the ratio's. An odd number of rows, as texts of their own
lengths have it, is not a multiple of what products take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

import te_dist as te
from benchmarks.report import Report, number, text
from benchmarks.timing import median_times
from te_dist import recipe

SHAPES = ((16384, 4096, 7168), (16001, 4096, 7168), (16384, 7168, 2048), (16001, 7168, 2048), (512, 512, 512))
RECIPES: dict[str, recipe.Recipe] = {
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: GPU and CPU times of a pass in microseconds, and bf16's GPU time over it."""

    shape: str
    weights: str
    recipe: str
    gpu: float
    tflops: float
    cpu_alone: float
    cpu_in_row: float
    speedup: float


def passes(module: nn.Module, x: Tensor, made_by: recipe.Recipe | None) -> Callable[[], None]:
    """One forward and backward pass that leaves gradients of input and weight."""
    grad = torch.randn(x.shape[0], module.out_features, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        x.grad = module.weight.grad = None
        with nullcontext() if made_by is None else te.autocast(recipe=made_by):
            out = module(x)
        out.backward(grad)

    return run


def issue_time(run: Callable[[], None], repeats: int, in_row: int = 1) -> float:
    """Microseconds of CPU time until a pass is handed over, where `in_row` are."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(in_row):
            run()
        times.append((time.perf_counter() - begin) / in_row * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def lines_of(shape: tuple[int, int, int], chosen: tuple[str, ...], repeats: int) -> list[Row]:
    """All lines of one shape: torch's Linear, then every recipe with plain and with quantized weights."""
    rows, features_out, features_in = shape
    x = torch.randn(rows, features_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    peer = nn.Linear(features_in, features_out, bias=False, device="cuda", dtype=torch.bfloat16)
    torch_pass = passes(peer, x, None)
    cases = [("bf16", "torch", torch_pass)]
    for name in chosen:
        for weights in ("plain", "quantized"):
            made_by = RECIPES[name]
            with te.quantized_model_init(enabled=weights == "quantized", recipe=made_by):
                module = te.Linear(features_in, features_out, bias=False, device="cuda", params_dtype=torch.bfloat16)
            cases.append((weights, name, passes(module, x, made_by)))
    lines = []
    for weights, name, run in cases:
        for _ in range(3):
            run()
        bf16, gpu = median_times([torch_pass, run], repeats)
        flops = 6 * rows * features_in * features_out
        cpu = issue_time(run, 2 * repeats), issue_time(run, repeats // 3, in_row=10)
        lines.append(Row(", ".join(map(str, shape)), weights, name, gpu, flops / gpu / 1e6, *cpu, bf16 / gpu))
    return lines


# Columns of what a forward and a backward pass take.
COSTS = {
    "GPU us": number("gpu"),
    "TFLOP/s": number("tflops"),
    "CPU us alone": number("cpu_alone"),
    "in a row": number("cpu_in_row"),
}
REPORT = Report(
    "linear_cuda",
    "Linear, forward and backward",
    "bf16 inputs and gradients, no bias. Speedup: time of torch's bf16 Linear in the same run over this one.",
    {
        "T, N, K": text("shape"),
        "recipe": text("recipe"),
        "weights": text("weights"),
        **COSTS,
        "speedup": number("speedup", 2),
    },
)


def main(out: Path | None = None, repeats: int = 25, recipes: tuple[str, ...] = tuple(RECIPES)) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    REPORT.publish((row for shape in SHAPES for row in lines_of(shape, recipes, repeats)), out)


if __name__ == "__main__":
    tyro.cli(main)
