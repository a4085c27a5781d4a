"""How fast is a mixture whose experts lie over ranks, beside one in torch's bf16?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.expert_parallel_cuda --out benchmarks/results

Forward and backward of some mixtures behind one another, each rank with tokens of its own and a part of the experts.
The peer is plain torch, `PlainExpertParallel`: a router in bf16, argsort and sums, rows sent by torch's all-to-all with
its gradient, `grouped_mm`. Of te_dist: without a recipe, and quantized weights by each; a copy of a token is sent
for each expert, plainly, as codes and scales, or into slots; or the token, once to each rank with experts of it; or the
batches of all ranks to all, without and with as many slots, and these as one CUDA graph. All run by turns, a few steps
in a row; times are those of the slowest rank, medians. Bytes are what a rank hands to collectives in a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from benchmarks.linear_cuda import RECIPES
from benchmarks.moe_cuda import Shape
from benchmarks.plain_moe import PlainExpertParallel
from benchmarks.ranks import all_gpus, publish, step_times
from benchmarks.report import Report, number, text
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.tensor.traffic import Traffic

# (tokens of a rank, H, F, experts, top-k): layers of Qwen3-30B-A3B, and of few wide experts.
SHAPES: tuple[Shape, ...] = ((8192, 2048, 768, 128, 8), (4096, 4096, 2048, 16, 4))
_WARM_PASSES = 3
CAPACITY = 1.25  # of what ranks send to each other in the mean
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    ", slots": {"capacity": CAPACITY},
    ", tokens": {"travels": "tokens"},
    ", batches": {"travels": "batches"},
    ", batches slots": {"travels": "batches", "capacity": CAPACITY},
    ", batches slots captured": {"travels": "batches", "capacity": CAPACITY, "captured": True},
    ", quantized": {"payload": "quantized"},
    ", tokens quantized": {"travels": "tokens", "payload": "quantized"},
}


@dataclass(frozen=True)
class Row:
    """A line: a step in ms, torch's over it, and MiB handed to collectives."""

    shape: str
    label: str
    step: float
    speedup: float
    sent: float


class Step:
    """Forward and backward of mixtures behind one another, of torch where `way` is None; `captured`: as one graph."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, *, recipe: str, way: str | None, layers: int) -> None:
        tokens, hidden, ffn, experts, top_k = shape
        self.made_by = RECIPES[recipe] if recipe else None
        self.layers: Any = nn.ModuleList()
        self.graph: torch.cuda.CUDAGraph | None = None
        options = dict(WAYS[way or ""])
        captured = options.pop("captured", False)
        if "capacity" in options:
            options["capacity"] = math.ceil(options["capacity"] * tokens * top_k / mesh.size())
        for _ in range(layers):
            if way is None:
                peer = PlainExpertParallel(hidden, ffn, experts, top_k, group=mesh.get_group())
                self.layers.append(peer.to("cuda", torch.bfloat16))
                continue
            with te.quantized_model_init(enabled=self.made_by is not None, recipe=self.made_by):
                layer = MoE(hidden, ffn, Routing(experts, top_k), params_dtype=torch.bfloat16, device="cuda")
            self.layers.append(parallelize_module(layer, mesh, ExpertParallel(**options)))
        self.x, self.grad = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if captured:
            self._capture()

    def __call__(self) -> None:
        """Gradients are dropped."""
        if self.graph is None:
            self.eager()
        else:
            self.graph.replay()

    def _capture(self) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(_WARM_PASSES):
                self.eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads that ask for events
            self.eager()
        self.graph = graph

    def eager(self) -> None:
        """Issues the kernels."""
        x = self.x.requires_grad_()
        with te.autocast(enabled=self.made_by is not None, recipe=self.made_by):
            for layer in self.layers:
                x = x + layer(F.rms_norm(x, x.shape[-1:]))
        x.backward(self.grad)
        self.layers.zero_grad()
        self.x.grad = None


def rows(shape: Shape, mesh: DeviceMesh, recipes: tuple[str, ...], *, layers: int, repeats: int) -> Iterator[Row]:
    """Torch's line, te_dist's in bf16, and those of each recipe."""
    lines: list[tuple[str, str | None]] = [("", None), ("", ""), ("", ", tokens")]
    lines += [(name, way) for name in recipes for way in WAYS if "quantized" not in way or name == "block"]
    steps = [Step(shape, mesh, recipe=name, way=way, layers=layers) for name, way in lines]
    times = step_times(steps, repeats)
    for (name, way), step, time in zip(lines, steps, times, strict=True):
        with Traffic() as traffic:
            step.eager()
        label = "torch bf16" if way is None else f"{name or 'bf16'}{way}"
        yield Row(", ".join(map(str, shape)), label, time, times[0] / time, _sent(traffic, mesh.size()) / 2**20)


def _sent(traffic: Traffic, num_ranks: int) -> int:
    """Bytes that a rank hands over: what it gathers goes to all."""
    return traffic.nbytes("all_to_all") + num_ranks * traffic.nbytes("all_gather")


def main(
    out: Path | None = None, recipes: tuple[str, ...] = ("block", "current"), layers: int = 4, repeats: int = 15
) -> None:
    """Prints a table; writes it as Markdown and JSON into `out`."""
    report = Report(
        "expert_parallel_cuda",
        "Experts over ranks",
        f"{layers} mixtures behind one another, the experts of each over all GPUs. A step is a forward and a backward "
        f"pass; MiB that a rank hands to collectives. Slots: {CAPACITY} times those of the mean.",
        {
            "tokens of a rank, H, F, E, k": text("shape"),
            "": text("label"),
            "step ms": number("step", 1),
            "torch's over it": number("speedup", 2),
            "sent MiB": number("sent"),
        },
    )
    with all_gpus("ep") as mesh:
        torch.manual_seed(mesh.get_rank())
        found = (row for shape in SHAPES for row in rows(shape, mesh, recipes, layers=layers, repeats=repeats))
        publish(report, found, out, mesh=mesh)


if __name__ == "__main__":
    tyro.cli(main)
