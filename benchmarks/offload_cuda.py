"""What does it cost to park activations in host memory, or to compute them again, and how much memory does it free?

    python -m benchmarks.offload_cuda --out benchmarks/results

Forward and backward of a Llama-shaped decoder on one GPU, without an optimizer. Of torch, in bf16: everything kept;
`save_on_cpu` into pinned memory; a checkpoint around every block; and torchtune's `OffloadActivations`, which copies
on streams of its own, where it is installed. Of te_dist, in FP8 blocks: everything kept; `offload.activations` of some
budgets; a checkpoint around every block, and both, which parks the inputs of blocks. All of a model run by turns; a
time is that on the device, the median. GiB are those at the peak, above what is held between steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_dist as te
from benchmarks.decoder import LLAMA, Decoder, in_bf16
from benchmarks.report import Report, number, text
from benchmarks.training_cuda import BACKENDS
from te_dist import recipe

PEER, WARM_STEPS = "torchtune", 3
FP8 = recipe.Float8BlockScaling()
Surrounding = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Way:
    """A line to be: what becomes of activations.

    Attributes:
        label: what the table calls it.
        surrounding: made anew for each forward pass.
        checkpoint: around each block; None for none.
    """

    label: str
    surrounding: Surrounding = nullcontext
    checkpoint: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Row:
    """A line: a step in ms, over that of the same model where everything is kept; GiB at the peak, and parked."""

    model: str
    label: str
    step: float
    over_kept: float
    peak: float
    parked: float | None


def torch_ways() -> Iterator[Way]:
    """What plain torch can do."""
    yield Way("kept")
    yield Way("save_on_cpu", partial(save_on_cpu, pin_memory=True))
    if find_spec(PEER) is not None:
        streamed = import_module(f"{PEER}.training").OffloadActivations
        yield Way("torchtune's OffloadActivations", partial(streamed, use_streams=True))
    yield Way("checkpoint", checkpoint=partial(torch_checkpoint, use_reentrant=False))


def own_ways(budgets: tuple[str, ...]) -> Iterator[Way]:
    """What te_dist can do."""
    yield Way("kept")
    for budget in budgets:
        yield Way(f"offload, {budget}", partial(te.offload.activations, budget=budget))
    yield Way("checkpoint", checkpoint=te.checkpoint)
    yield Way("checkpoint, offload", partial(te.offload.activations, budget=None), te.checkpoint)


def made(*, quantized: bool) -> Decoder:
    """The model, weights in bf16 or quantized."""
    made_by = FP8 if quantized else None
    with in_bf16(), te.quantized_model_init(enabled=quantized, recipe=made_by), torch.device("cuda"):
        return Decoder(LLAMA, quantized=quantized)


class Step:
    """Forward and backward of a model in some way."""

    def __init__(self, model: Decoder, tokens: Tensor, *, quantized: bool) -> None:
        self.model, self.inputs, self.targets = model, tokens[:, :-1], tokens[:, 1:]
        self.quantized = quantized
        self.parked: float | None = None
        self._forwards = [block.forward for block in model.blocks]

    def __call__(self, way: Way) -> None:
        """Gradients are dropped."""
        for block, forward in zip(self.model.blocks, self._forwards, strict=True):
            block.forward = forward if way.checkpoint is None else partial(way.checkpoint, forward)
        with te.autocast(enabled=self.quantized, recipe=FP8 if self.quantized else None), way.surrounding() as found:
            loss = self.model(self.inputs, self.targets)
        loss.backward()
        self.model.zero_grad()
        self.parked = found.peak / 2**30 if hasattr(found, "peak") else None


def rows_of(name: str, step: Step, ways: list[Way], repeats: int) -> Iterator[Row]:
    """A line for each way."""
    times: dict[str, list[float]] = {way.label: [] for way in ways}
    peaks: dict[str, float] = {}
    parked: dict[str, float | None] = {}
    for turn in range(WARM_STEPS + repeats):
        for way in ways:
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(way)
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_STEPS:
                times[way.label].append(begin.elapsed_time(end))
                peaks[way.label] = (torch.cuda.max_memory_allocated() - held) / 2**30
                parked[way.label] = step.parked
    medians = {label: sorted(found)[len(found) // 2] for label, found in times.items()}
    for label, median in medians.items():
        yield Row(name, label, median, median / medians["kept"], peaks[label], parked[label])


def rows(length: int, budgets: tuple[str, ...], repeats: int) -> Iterator[Row]:
    """Of both models."""
    tokens = torch.randint(LLAMA.vocabulary, (1, length + 1), device="cuda")
    for name, quantized in (("torch bf16", False), ("te_dist, FP8 blocks", True)):
        step = Step(made(quantized=quantized), tokens, quantized=quantized)
        yield from rows_of(name, step, list(own_ways(budgets) if quantized else torch_ways()), repeats)
        del step
        gc.collect()
        torch.cuda.empty_cache()


def main(
    out: Path | None = None,
    length: int = 8192,
    budgets: tuple[str, ...] = ("2GiB", "4GiB", "64GiB"),
    repeats: int = 9,
) -> None:
    """Prints a table of sequences of this `length`; writes it as Markdown and JSON."""
    torch.manual_seed(0)
    report = Report(
        "offload_cuda",
        "Activations parked in host memory",
        f"{LLAMA}, one sequence of {length}. A step is a forward and a backward pass; over kept: over that of the same "
        "model that keeps everything. GiB at the peak, above what is held between steps.",
        {
            "model": text("model"),
            "activations": text("label"),
            "step ms": number("step", 1),
            "over kept": number("over_kept", 2),
            "peak GiB": number("peak", 1),
            "parked GiB": number("parked", 1),
        },
    )
    with sdpa_kernel(BACKENDS, set_priority=True), torch.autograd.set_multithreading_enabled(False):
        report.publish(rows(length, budgets, repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
