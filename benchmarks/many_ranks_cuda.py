"""What does a rank of hundreds pay to wrap a decoder under FSDP2, for its first steps, and for those that follow?

    python -m benchmarks.many_ranks_cuda --out benchmarks/results

One GPU, in a process group that pretends: there is no other rank, a gather puts this one's part in the place of every
other's (a copy for each, issued by the CPU), and a reduction leaves things as they are. So nothing is sent, and what is
left is what a rank itself does for parameters that are cut so often: to cut them, to plan gathers, to put together what
was gathered. The peer is plain torch in bf16, as in `training_cuda`. A first run of each line, over few ranks, is not
counted: kernels are compiled in it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.report import Report, number, text
from benchmarks.training_cuda import Case, Job
from te_dist._torch_private import pretended_ranks

_LATER = 10  # steps
_FEW = 4  # ranks


@dataclass(frozen=True)
class Row:
    """A line: seconds to build and wrap, and of the first two steps together; milliseconds of those that follow, and of
    the CPU to hand one over; GiB at the peak."""

    ranks: int
    label: str
    built: float
    first: float
    step: float
    issue: float
    peak: float


def seconds(run: Callable[[], object]) -> float:
    """Of `run`, with what it has launched."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def issue_of(run: Callable[[], object]) -> float:
    """Seconds until the CPU has handed over what `run` launches."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def row_of(case: Case, ranks: int) -> Row:
    """Builds a job of rank 1, trains it and throws it away."""
    made: list[Job] = []
    with pretended_ranks(ranks, 1), torch.autograd.set_multithreading_enabled(False):
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
        built = seconds(lambda: made.append(Job(case, mesh)))
        (job,) = made
        first = seconds(job) + seconds(job)
        torch.cuda.reset_peak_memory_stats()
        times = sorted(seconds(job) for _ in range(_LATER))
        peak = torch.cuda.max_memory_allocated() / 2**30
        issues = sorted(issue_of(job) for _ in range(_LATER))
    step, issue = (found[_LATER // 2] * 1e3 for found in (times, issues))
    return Row(ranks, case.label, built, first, step, issue, peak)


def rows_of(cases: list[Case], counts: tuple[int, ...]) -> Iterator[Row]:
    """Every case over every number of ranks."""
    for case in cases:
        for warms, ranks in ((True, _FEW), *((False, count) for count in counts)):
            row = row_of(case, ranks)
            gc.collect()
            torch.cuda.empty_cache()
            if not warms:
                yield row


REPORT = Report(
    "many_ranks_cuda",
    "One rank of many under FSDP2",
    "llama, a sequence of 2048 tokens. Nothing is sent: a process group that pretends puts a rank's own part in the "
    "place of all others, a copy for each. Seconds to build and wrap the model, and of the first two steps; "
    "milliseconds of a later step, and of the CPU to hand it over.",
    {
        "ranks": text("ranks"),
        "recipe": text("label"),
        "built s": number("built", 2),
        "two steps s": number("first", 2),
        "step ms": number("step", 1),
        "CPU ms": number("issue", 1),
        "peak GiB": number("peak", 1),
    },
)


def main(
    out: Path | None = None,
    counts: tuple[int, ...] = (8, 64, 256, 1024),
    recipes: tuple[str, ...] = ("block", "mxfp8"),
) -> None:
    """Prints a table of torch's bf16 and each recipe over each number of ranks; writes it as Markdown and JSON."""
    torch.manual_seed(0)
    REPORT.publish(rows_of([Case("llama", 1, 2048, name) for name in ("", *recipes)], counts), out)


if __name__ == "__main__":
    tyro.cli(main)
