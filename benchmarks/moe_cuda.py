"""What does a mixture of experts cost beside one in torch's bf16? Forward + backward on one GPU: time, memory, parts.

    python -m benchmarks.moe_cuda --out benchmarks/results --shares

All experts on this GPU, bf16 tokens and gradients, quantized weights, router included. The peer is the same block in
plain torch: bf16 router, argsort, `grouped_mm`, SwiGLU and probabilities in bf16, `index_add`. GPU times start with a
cold L2 cache and behind other work; issue times are what the CPU takes to hand over a pass, alone to an idle GPU, and
as one of ten in a row. With `--shares`, one pass of every line is profiled, and ops are listed by their part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import te_dist as te
from benchmarks.grouped_linear_cuda import peak_memory
from benchmarks.linear_cuda import COSTS, RECIPES, issue_time
from benchmarks.report import Report, number, text
from benchmarks.timing import median_time
from te_dist import recipe
from te_dist._torch_private import TorchDispatchMode
from te_dist.nn.moe import MoE, Routing

# (tokens, H, F, experts, top-k): a layer of Qwen3-30B-A3B, and one of few wide experts.
SHAPES = ((16384, 2048, 768, 128, 8), (8192, 4096, 2048, 16, 4))
NUM_SHARES = 20

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


class TorchMoE(nn.Module):
    """The peer."""

    def __init__(self, hidden: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        options = dict(dtype=torch.bfloat16, device="cuda")
        self.router = nn.Parameter(torch.randn(experts, hidden, **options) * 0.02)
        self.first = nn.Parameter(torch.randn(experts, 2 * ffn, hidden, **options) * 0.02)
        self.second = nn.Parameter(torch.randn(experts, hidden, ffn, **options) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden)."""
        scores = F.linear(x, self.router).float().softmax(-1)
        chosen, experts = scores.topk(self.top_k, dim=-1)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(scores.shape[1], dtype=torch.int32, device=x.device)
        counts.index_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
        ends, tokens = counts.cumsum(0).int(), order // self.top_k
        gate, up = F.grouped_mm(x[tokens], self.first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * chosen.flatten()[order, None].to(x.dtype)
        made = F.grouped_mm(hidden, self.second.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add(0, tokens, made)


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
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            out = module(x)
        out.backward(grad)

    return run


class Watched(TorchDispatchMode):
    """Changes nothing, but that te_dist calls its ops one by one, under their names."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def shares_of(run: Callable[[], None]) -> list[str]:
    """Ops of a pass by their part of its time on the GPU."""
    with Watched(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    ops = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    ops.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in ops)
    return [
        f"| {op.key[:90]} | {op.count} | {op.self_device_time_total:.0f} | {op.self_device_time_total / total:.1%} |"
        for op in ops[:NUM_SHARES]
    ]


def lines_of(shape: Shape, chosen: tuple[str, ...], repeats: int, parts: list[str] | None) -> Iterator[Row]:
    """The peer, te_dist's bf16, then every recipe."""
    tokens, hidden, ffn, experts, top_k = shape
    flops = 3 * 2 * tokens * top_k * hidden * 3 * ffn
    peer = step(TorchMoE(hidden, ffn, experts, top_k), None, shape)
    cases: list[tuple[str, recipe.Recipe | None]] = [("bf16", None), *((name, RECIPES[name]) for name in chosen)]
    for name, run in [
        ("torch bf16", peer),
        *((name, step(ours(shape, made_by), made_by, shape)) for name, made_by in cases),
    ]:
        for _ in range(3):
            run()
        of_peer, gpu = median_time(peer, repeats), median_time(run, repeats)
        cpu = issue_time(run, repeats), issue_time(run, repeats // 3, in_row=10)
        yield Row(", ".join(map(str, shape)), name, gpu, flops / gpu / 1e6, *cpu, peak_memory(run), of_peer / gpu)
        if parts is not None:
            parts += [f"\n## {name}, {shape}\n", "| op | calls | us | part |", "|---|---|---|---|", *shares_of(run)]


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
) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    parts: list[str] | None = [] if shares else None
    end: list[str] = parts if parts is not None else []
    REPORT.publish((row for shape in SHAPES for row in lines_of(shape, recipes, repeats, parts)), out, end=end)
    print("\n".join(end))


if __name__ == "__main__":
    tyro.cli(main)
