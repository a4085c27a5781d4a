"""What does a GroupedLinear cost beside torch's bf16 products? Forward + backward on one GPU: time, issue time, memory.

    python -m benchmarks.grouped_linear_cuda --out benchmarks/results

bf16 inputs and gradients, no bias, sizes of groups on the device. The peer is torch's `grouped_mm` in bf16: its three
products alone (forward, dgrad, wgrad). GPU times start with a cold L2 cache and behind other work; issue times are what
the CPU takes to hand over a pass: alone to an idle GPU, and as one of ten in a row. Memory is the peak above what is
there before a pass. Medians; the peer runs between the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

import te_dist as te
from benchmarks.grouped_cases import group_sizes
from benchmarks.linear_cuda import COSTS, RECIPES, issue_time
from benchmarks.report import Report, number, text
from benchmarks.timing import median_times
from te_dist import recipe

# (groups, rows of all, N, K): those of common mixtures of experts, and two that the CPU alone takes time for.
SHAPES = (
    (8, 32768, 4096, 7168),
    (8, 32768, 7168, 2048),
    (32, 32768, 4096, 2048),
    (128, 65536, 1536, 2048),
    (128, 65536, 2048, 768),
    (8, 1024, 512, 512),
    (128, 16384, 256, 256),
)
# How weights are kept: quantized or not, in one parameter or in one for each group, both directions or the rowwise one.
KINDS = ("quantized", "quantized, both directions", "quantized, each", "plain", "plain, each")


@dataclass(frozen=True)
class Row:
    """A line of the table: times in microseconds, memory in MiB, the peer's time over this one's."""

    shape: str
    routing: str
    recipe: str
    weights: str
    gpu: float
    tflops: float
    cpu_alone: float
    cpu_in_row: float
    memory: float
    speedup: float


@dataclass(frozen=True)
class Layer:
    """Operands of one layer.

    Attributes:
        sizes: of the groups; rows behind the last are nobody's.
        x: (T, K) bf16, requires grad.
        grad: (T, N) bf16.
    """

    shape: tuple[int, int, int, int]
    sizes: list[int]
    x: Tensor
    grad: Tensor

    @staticmethod
    def of(shape: tuple[int, int, int, int], routing: str) -> Layer:
        """Random ones."""
        groups, rows, features_out, features_in = shape
        x, grad = (
            torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (features_in, features_out)
        )
        return Layer(shape, group_sizes(routing, groups, rows), x.requires_grad_(), grad)

    @property
    def flops(self) -> int:
        """Of the three products."""
        return 6 * sum(self.sizes) * self.shape[2] * self.shape[3]


def peer_pass(layer: Layer) -> Callable[[], None]:
    """The three products of torch in bf16, and nothing else."""
    groups, _, features_out, features_in = layer.shape
    weight = torch.randn(groups, features_out, features_in, device="cuda", dtype=torch.bfloat16)
    ends, x, grad = torch.tensor(layer.sizes, device="cuda").cumsum(0).int(), layer.x.detach(), layer.grad

    def run() -> None:
        F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        F.grouped_mm(grad, weight, offs=ends)
        F.grouped_mm(grad.t(), x, offs=ends)

    return run


def module_pass(layer: Layer, made_by: recipe.Recipe | None, weights: str) -> Callable[[], None]:
    """Forward and backward of a GroupedLinear, which leave gradients of input and weights."""
    step, splits = module_step(layer.shape, made_by, weights), torch.tensor(layer.sizes, device=layer.x.device)
    return lambda: step(layer.x, splits, layer.grad)


def module_step(
    shape: tuple[int, int, int, int], made_by: recipe.Recipe | None, weights: str, *, device: str = "cuda"
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The same for any input, sizes of groups and gradient of the output."""
    groups, _, features_out, features_in = shape
    is_quantized = weights.startswith("quantized")
    with te.quantized_model_init(enabled=is_quantized, recipe=made_by):
        module = te.GroupedLinear(
            groups,
            features_in,
            features_out,
            bias=False,
            single_grouped_weight="each" not in weights,
            fuse_wgrad_accumulation="main_grad" in weights,
            device=device,
            params_dtype=torch.bfloat16,
        )
    if "both" in weights:
        module.weight.update_usage(rowwise_usage=True, columnwise_usage=True)
    parameters = [getattr(module, name) for name in module.weight_names]
    if "main_grad" in weights:
        whole = torch.zeros(groups, features_out, features_in, device=device)
        for parameter, main_grad in zip(parameters, whole if "each" in weights else [whole], strict=True):
            parameter.main_grad = main_grad

    def run(x: Tensor, splits: Tensor, grad: Tensor) -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with nullcontext() if made_by is None else te.autocast(recipe=made_by):
            out = module(x, splits)
        out.backward(grad)

    return run


def peak_memory(run: Callable[[], None]) -> float:
    """MiB that a pass takes at most, beyond what is there before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def lines_of(
    layer: Layer, routing: str, chosen: tuple[str, ...], kinds: tuple[str, ...], repeats: int
) -> Iterator[Row]:
    """All lines of one layer: the peer, te_dist's bf16, then every recipe with every kind of weights."""
    torch_pass = peer_pass(layer)
    cases: list[tuple[str, str, Callable[[], Callable[[], None]]]] = [("torch bf16", "products", lambda: torch_pass)]
    for kind in kinds:
        if kind.startswith("plain"):
            cases.append(("bf16", kind, lambda kind=kind: module_pass(layer, None, kind)))
        for name in chosen:
            cases.append((name, kind, lambda kind=kind, name=name: module_pass(layer, RECIPES[name], kind)))
    for name, kind, make in cases:
        run = make()
        for _ in range(3):
            run()
        peer, gpu = median_times([torch_pass, run], repeats)
        cpu = issue_time(run, repeats), issue_time(run, repeats // 3, in_row=10)
        shape = ", ".join(map(str, layer.shape))
        yield Row(shape, routing, name, kind, gpu, layer.flops / gpu / 1e6, *cpu, peak_memory(run), peer / gpu)
        del run
        layer.x.grad = None
        torch.cuda.empty_cache()


REPORT = Report(
    "grouped_linear_cuda",
    "GroupedLinear, forward and backward",
    "bf16 inputs and gradients, no bias. Speedup: time of torch's three bf16 products alone in the same run over this.",
    {
        "G, T, N, K": text("shape"),
        "sizes": text("routing"),
        "recipe": text("recipe"),
        "weights": text("weights"),
        **COSTS,
        "peak MiB": number("memory"),
        "speedup": number("speedup", 2),
    },
)


def main(
    out: Path | None = None,
    repeats: int = 25,
    recipes: tuple[str, ...] = ("block", "current", "mxfp8"),
    kinds: tuple[str, ...] = KINDS,
    routings: tuple[str, ...] = ("aligned", "ragged"),
) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    layers = ((Layer.of(shape, routing), routing) for shape in SHAPES for routing in routings)
    REPORT.publish((row for layer, routing in layers for row in lines_of(layer, routing, recipes, kinds, repeats)), out)


if __name__ == "__main__":
    tyro.cli(main)
