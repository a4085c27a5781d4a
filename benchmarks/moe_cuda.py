"""What does a mixture of experts cost beside one in torch's bf16? Forward + backward on one GPU: time, memory, parts.

    python -m benchmarks.moe_cuda --out benchmarks/results --shares

All experts on this GPU, bf16 tokens and gradients, quantized weights, router included. The peer is the same block in
plain torch: bf16 router, argsort, `grouped_mm`, SwiGLU and probabilities in bf16, `index_add`. GPU times start with a
cold L2 cache and behind other work; issue times are what the CPU takes to hand over a pass, alone to an idle GPU, and
as one of ten in a row. With `--shares`, one pass of every line is profiled, and ops are listed by their part of it.
With `--compiled` every line comes again, compiled by `mode="reduce-overhead"`: in CUDA graphs of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import nn

import te_dist as te
from benchmarks.grouped_linear_cuda import peak_memory
from benchmarks.linear_cuda import COSTS, RECIPES, issue_time
from benchmarks.plain_moe import PlainMoE
from benchmarks.report import Report, number, text
from benchmarks.shares import shares_of
from benchmarks.timing import median_times
from te_dist import recipe
from te_dist.nn.moe import MoE, Routing

# (tokens, H, F, experts, top-k): a layer of Qwen3-30B-A3B, one of few wide experts, and the first of few tokens, whose
# passes in a row take as long as the CPU does.
SHAPES = ((16384, 2048, 768, 128, 8), (8192, 4096, 2048, 16, 4), (4096, 2048, 768, 128, 8))
FEW = (512, 2048, 768, 64, 8)  # besides, with `--compiled`

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Row:
    """A line of the table: times in microseconds, memory in MiB, the peer's time over this one's."""

    shape: str
    recipe: str
    gpu: float
    tflops: float
    cpu_alone: float
    cpu_in_row: float
    memory: float
    speedup: float


def ours(shape: Shape, made_by: recipe.Recipe | None) -> nn.Module:
    """te_dist's block, its weights quantized where there is a recipe."""
    _, hidden, ffn, experts, top_k = shape
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        return MoE(hidden, ffn, Routing(experts, top_k), params_dtype=torch.bfloat16, device="cuda")


def step(module: nn.Module, made_by: recipe.Recipe | None, shape: Shape) -> Callable[[], None]:
    """Forward and backward, which leave gradients of tokens and weights."""
    x, grad = (torch.randn(shape[0], shape[1], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            out = module(x)
        out.backward(grad)

    return run


def lines_of(
    shape: Shape, chosen: tuple[str, ...], repeats: int, *, compiled: bool, parts: list[str] | None
) -> Iterator[Row]:
    """The peer, te_dist's bf16, then every recipe; with `compiled` each of these again."""
    tokens, hidden, ffn, experts, top_k = shape
    flops = 3 * 2 * tokens * top_k * hidden * 3 * ffn
    plain = PlainMoE(hidden, ffn, experts, top_k).to("cuda", torch.bfloat16)
    cases = [("torch bf16", plain, None), ("bf16", ours(shape, None), None)]
    cases += [(name, ours(shape, RECIPES[name]), RECIPES[name]) for name in chosen]
    peer = step(plain, None, shape)
    for is_compiled in (False, True)[: 1 + compiled]:
        for name, module, made_by in cases:
            torch.compiler.reset()
            run = step(torch.compile(module, mode="reduce-overhead") if is_compiled else module, made_by, shape)
            for _ in range(6):
                run()
            of_peer, gpu = median_times([peer, run], repeats)
            cpu = issue_time(run, repeats), issue_time(run, repeats // 3, in_row=10)
            label = f"{name}, compiled" if is_compiled else name
            yield Row(", ".join(map(str, shape)), label, gpu, flops / gpu / 1e6, *cpu, peak_memory(run), of_peer / gpu)
            if parts is not None and not is_compiled:
                parts += [f"\n## {name}, {shape}\n", *shares_of(run)]


REPORT = Report(
    "moe_cuda",
    "A mixture of experts, forward and backward",
    "Router, sorting, experts and sums; bf16 tokens. TFLOP/s count the experts' products. Speedup: time of the same "
    "block in plain torch in the same run over this one's.",
    {
        "tokens, H, F, E, k": text("shape"),
        "recipe": text("recipe"),
        **COSTS,
        "peak MiB": number("memory"),
        "speedup": number("speedup", 2),
    },
)


def main(
    out: Path | None = None,
    repeats: int = 25,
    recipes: tuple[str, ...] = ("block", "current", "mxfp8"),
    shares: bool = False,
    compiled: bool = False,
) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    parts: list[str] | None = [] if shares else None
    end: list[str] = parts if parts is not None else []
    shapes = (*SHAPES, FEW) if compiled else SHAPES
    rows = (row for shape in shapes for row in lines_of(shape, recipes, repeats, compiled=compiled, parts=parts))
    REPORT.publish(rows, out, end=end)
    print("\n".join(end))


if __name__ == "__main__":
    tyro.cli(main)
