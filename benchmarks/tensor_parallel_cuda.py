"""How fast are blocks over the ranks of tensor and sequence parallelism, beside torch's own styles in bf16?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.tensor_parallel_cuda --out benchmarks/results

Forward and backward of some Llama-shaped blocks whose sequence is cut between the maps: of torch in bf16 by
`ColwiseParallel`, `RowwiseParallel` and `SequenceParallel`, of te_dist by the styles of `te_dist.tensor_parallel`,
whose inputs are gathered quantized, once for all the maps that read them; in eager mode, and each block as one graph of
torch.compile, whose second mode captures CUDA graphs, collectives too. Weights of te_dist are quantized; norms,
rotary embedding, attention and activation are the same code. All run by turns; times are those of the slowest rank,
medians. Bytes are what a rank hands to collectives in a step, as `te_dist.tensor.traffic.Traffic` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.attention import sdpa_kernel

import te_dist as te
from benchmarks.decoder import LLAMA, Rotary, Shape, in_bf16, rotary_table, rotate
from benchmarks.linear_cuda import RECIPES
from benchmarks.ranks import all_gpus, publish, step_times
from benchmarks.report import Report, number, text
from benchmarks.training_cuda import BACKENDS
from te_dist import recipe
from te_dist.launch.parallelize import block_plan
from te_dist.tensor.traffic import Traffic

Plan = dict[str, ParallelStyle]
MODES = {"": None, ", compiled": "default", ", compiled for CUDA graphs": "reduce-overhead"}


@dataclass(frozen=True)
class Row:
    """A line: a step in ms, torch's over it, and MiB handed to collectives."""

    label: str
    step: float
    speedup: float
    gathered: float
    reduced: float


class Attention(nn.Module):
    """Causal attention of this rank's heads."""

    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.width = shape.width
        self.query = linear(shape.hidden, shape.attended, bias=False)
        self.key = linear(shape.hidden, shape.kv_heads * shape.width, bias=False)
        self.value = linear(shape.hidden, shape.kv_heads * shape.width, bias=False)
        self.out = linear(shape.attended, shape.hidden, bias=False)

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """`x`: (B, S, hidden)."""
        query, key, value = (each(x).unflatten(-1, (-1, self.width)) for each in (self.query, self.key, self.value))
        query, key, value = (t.transpose(1, 2) for t in (rotate(query, table), rotate(key, table), value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU of this rank's columns."""

    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.gate = linear(shape.hidden, shape.ffn, bias=False)
        self.up = linear(shape.hidden, shape.ffn, bias=False)
        self.down = linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: (B, S, hidden)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and what follows it; between them a rank has its part of the sequence."""

    def __init__(self, shape: Shape, *, linear: Callable[..., nn.Module], norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(shape.hidden), Attention(shape, linear)
        self.feed_forward_norm, self.feed_forward = norm(shape.hidden), FeedForward(shape, linear)

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """`x`: (B, S / ranks, hidden)."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


def torch_plan() -> Plan:
    """Torch's styles."""
    column, row = torch_styles.ColwiseParallel, torch_styles.RowwiseParallel
    return {
        "attention_norm": torch_styles.SequenceParallel(use_local_output=True),
        "attention": torch_styles.PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": column(),
        "attention.key": column(),
        "attention.value": column(),
        "attention.out": row(output_layouts=Shard(1)),
        "feed_forward_norm": torch_styles.SequenceParallel(use_local_output=True),
        "feed_forward": torch_styles.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": column(),
        "feed_forward.up": column(),
        "feed_forward.down": row(output_layouts=Shard(1)),
    }


class Step:
    """Forward and backward of blocks, of one recipe or of torch, compiled in a mode of torch.compile, or not."""

    def __init__(
        self, made_by: recipe.Recipe | None, mesh: DeviceMesh, *, length: int, layers: int, mode: str | None
    ) -> None:
        self.made_by, self.group = made_by, mesh.get_group()
        linear: Any = nn.Linear if made_by is None else te.Linear
        norm: Any = nn.RMSNorm if made_by is None else te.RMSNorm
        with in_bf16(), te.quantized_model_init(enabled=made_by is not None, recipe=made_by), torch.device("cuda"):
            self.blocks = nn.ModuleList(Block(LLAMA, linear=linear, norm=norm) for _ in range(layers))
        for block in self.blocks:
            parallelize_module(block, mesh, torch_plan() if made_by is None else block_plan(has_experts=False))
            if mode is not None:
                block.compile(fullgraph=True, mode=mode)
        own = 1, length // mesh.size(), LLAMA.hidden
        self.x, self.grad = (torch.randn(own, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.table = rotary_table(LLAMA, length, torch.device("cuda"))

    def __call__(self) -> None:
        """Gradients are dropped."""
        torch.compiler.cudagraph_mark_step_begin()
        x = self.x.requires_grad_()
        with te.autocast(enabled=self.made_by is not None, recipe=self.made_by, amax_reduction_group=self.group):
            for block in self.blocks:
                x = block(x, self.table)
        x.backward(self.grad)
        self.blocks.zero_grad()
        self.x.grad = None


def rows(names: tuple[str, ...], mesh: DeviceMesh, *, length: int, layers: int, repeats: int) -> Iterator[Row]:
    """Torch's line, and one for each recipe; then those of compiled blocks."""
    chosen = {"torch bf16": None} | {name: RECIPES[name] for name in names}
    made = {
        name + label: Step(each, mesh, length=length, layers=layers, mode=mode)
        for label, mode in MODES.items()
        for name, each in chosen.items()
        if not (mode and isinstance(each, recipe.DelayedScaling))  # whose histories are none of a graph
    }
    times = step_times(list(made.values()), repeats)
    for (name, step), time in zip(made.items(), times, strict=True):
        with Traffic() as traffic:
            step()
        gathered = traffic.nbytes("all_gather") / 2**20
        yield Row(name, time, times[0] / time, gathered, traffic.nbytes() / 2**20 - gathered)


def main(
    out: Path | None = None,
    recipes: tuple[str, ...] = ("block", "current", "delayed"),
    length: int = 8192,
    layers: int = 4,
    repeats: int = 15,
) -> None:
    """Prints a table of one sequence of this `length`; writes it as Markdown and JSON."""
    report = Report(
        "tensor_parallel_cuda",
        "Tensor and sequence parallelism",
        f"{layers} blocks of {LLAMA}, one sequence of {length} cut over all GPUs. A step is a forward and a backward "
        "pass; MiB that a rank hands to collectives that gather, and to those that add.",
        {
            "": text("label"),
            "step ms": number("step", 1),
            "torch's over it": number("speedup", 2),
            "gathered MiB": number("gathered"),
            "added MiB": number("reduced"),
        },
    )
    with sdpa_kernel(BACKENDS, set_priority=True), all_gpus("tp") as mesh:
        torch.manual_seed(0)
        publish(report, rows(recipes, mesh, length=length, layers=layers, repeats=repeats), out, mesh=mesh)


if __name__ == "__main__":
    tyro.cli(main)
