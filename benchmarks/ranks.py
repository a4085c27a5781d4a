"""What benchmarks have in common that the ranks of torchrun run together, each with a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.report import Report

_WARM_TURNS = 4
_IN_A_ROW = 3  # steps of a turn, between which the CPU does not wait


@contextmanager
def all_gpus(name: str) -> Iterator[DeviceMesh]:
    """A mesh of all ranks, in whose block backward runs in the thread that calls it."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=(name,))
    with torch.autograd.set_multithreading_enabled(False):
        yield mesh
    dist.destroy_process_group()


def publish(
    report: Report, rows: Iterable[Any], out: Path | None, *, mesh: DeviceMesh, end: Sequence[str] = ()
) -> None:
    """Of rows that all ranks find together; the first one prints and writes them."""
    if dist.get_rank() == 0:
        report.publish(rows, out, facts={"GPUs": str(mesh.size())}, end=end)
    else:
        list(rows)


def over_ranks(value: float) -> float:
    """The largest."""
    found = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def step_times(steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each, by turns of a few steps: medians, those of the slowest rank. Collective; ranks begin turns
    together.
    """
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(_WARM_TURNS + repeats):
        for times, step in zip(found, steps, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record()
            for _ in range(_IN_A_ROW):
                step()
            end.record()
            torch.cuda.synchronize()
            if turn >= _WARM_TURNS:
                times.append(begin.elapsed_time(end) / _IN_A_ROW)
    return [over_ranks(sorted(times)[len(times) // 2]) for times in found]
