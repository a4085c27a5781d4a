"""How near is a step of FusedAdam to a copy of as many bytes? Beside torch's fused AdamW, on one GPU.

    python benchmarks/optim_cuda.py --out benchmarks/results

Bytes of a step are what it must move. torch: parameter, gradient and two moments read, all but the gradient written:
7 elements (28 bytes a parameter in fp32, 14 in bf16). FusedAdam, with fp32 master and moments: 24 and the gradient,
and the codes and scales of each direction; where scales need an amax of the whole, masters are read once more (4).
The copy beside a step moves the same number of bytes, half read and half written. Medians; caches are cold, as every
list is larger than they are. `issue` is the time that the host needs to start a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import nn

from benchmarks.report import Report, number, text
from te_dist import optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import quantize

Shape = tuple[int, ...]

# (rows, cols) of the weights of a block, of which a rank of 8 holds an eighth of the rows; norms beside.
LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
LISTS = {
    "Llama 8B, 32 blocks over 8 ranks": ([(rows // 8, cols) for rows, cols in LLAMA_8B] * 32, [(512,)] * 65),
    "MoE, 300 parameters": ([(1536, 2048), (2048, 768)] * 144, [(2048,)] * 12),
}
NAMES = ("float8_block_2d", "float8_block_1d", "mxfp8_1d", "float8_tensorwise", "nvfp4_2d", "high_precision")
TWO_PHASES = ("float8_tensorwise", "nvfp4_2d")


@dataclass(frozen=True)
class Row:
    """A line of the table: bytes of a parameter, times in microseconds, ratio of the copy's time to the step's."""

    list: str
    optimizer: str
    gradients: str
    bytes_per_element: float
    step: float
    copy: float
    ratio: float
    issue: float


def median(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Microseconds on the device, and those of the host to issue it."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    issued = []
    for _ in range(3):
        call()
    for begin, end in events:
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000)  # so that the device waits for no launch
        begin.record()
        start = time.perf_counter()
        call()
        issued.append((time.perf_counter() - start) * 1e6)
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)
    return times[repeats // 2], sorted(issued)[repeats // 2]


def plain(shapes: list[Shape], dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters with gradients of their type."""
    found = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    for param in found:
        param.grad = torch.randn_like(param)
    return found


def quantized(name: str, shapes: list[Shape]) -> list[nn.Parameter]:
    """Parameters of a format with bf16 gradients."""
    found = []
    for shape in shapes:
        values = torch.randn(shape, device="cuda").bfloat16()
        storage = quantize(values, FORMATS[name]).storage
        storage.update_usage(columnwise_usage=False if storage.format.columnwise_is_derivable else None)
        param = nn.Parameter(QuantizedParameter(storage))
        param.grad = values
        found.append(param)
    return found


def cases(weights: list[Shape], norms: list[Shape]) -> Iterator[tuple[str, str, torch.optim.Optimizer, float]]:
    """Name, type of gradients, optimizer, bytes per element."""
    for dtype, size in ((torch.float32, 28.0), (torch.bfloat16, 14.0)):
        yield "torch AdamW", str(dtype), torch.optim.AdamW(plain(weights + norms, dtype), fused=True), size
    params = plain(weights + norms, torch.float32)
    yield "FusedAdam, fp32", "torch.float32", optim.FusedAdam(params), 28.0
    params = plain(weights + norms, torch.bfloat16)
    yield "FusedAdam, bf16 and masters", "torch.bfloat16", optim.FusedAdam(params), 28.0
    for name in NAMES:
        params = quantized(name, weights)
        written = sum(b.nbytes for p in params for b in p.data.storage.buffers.values())
        size = 26.0 + written / sum(p.numel() for p in params) + (4.0 if name in TWO_PHASES else 0.0)
        yield f"FusedAdam, {name}", "torch.bfloat16", optim.FusedAdam(params + plain(norms, torch.bfloat16)), size
    yield from in_fewer_bits(weights + norms)


def in_fewer_bits(shapes: list[Shape]) -> Iterator[tuple[str, str, torch.optim.Optimizer, float]]:
    """bf16 parameters: what is kept of each, read and written, beside itself and its gradient (6 bytes)."""
    options = {
        "fp32 masters, bf16 moments": (
            {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
            8.0 + 8.0 - 2.0,
        ),
        "remainders": ({"store_param_remainders": True}, 4.0 + 16.0),
        "remainders, moments in bytes": (
            {"store_param_remainders": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
            4.0 + 4.0 * (1 + 4 / 128),
        ),
        "no masters, by chance": ({"master_weights": False, "stochastic_rounding": True}, 16.0),
    }
    for name, (own, size) in options.items():
        optimizer = optim.FusedAdam(plain(shapes, torch.bfloat16), **own)
        yield f"FusedAdam, bf16, {name}", "torch.bfloat16", optimizer, 6.0 + size


def copy_time(nbytes: float, repeats: int) -> float:
    """Microseconds of a device copy that moves `nbytes` in all, by parts."""
    part, parts = 2**30, max(1, round(nbytes / 2**31))
    source, target = (torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copies() -> None:
        for _ in range(parts):
            target.copy_(source)

    return median(copies, repeats)[0] * nbytes / (2.0 * part * parts)


def rows(repeats: int) -> Iterator[Row]:
    """All lines."""
    for title, (weights, norms) in LISTS.items():
        elements = sum(torch.Size(shape).numel() for shape in weights + norms)
        for name, gradients, optimizer, size in cases(weights, norms):
            step, issue = median(optimizer.step, repeats)
            copy = copy_time(size * elements, repeats)
            yield Row(title, name, gradients.removeprefix("torch."), round(size, 2), step, copy, copy / step, issue)
            optimizer.zero_grad()
            del optimizer


REPORT = Report(
    "optim_cuda",
    "Optimizer steps",
    "Medians in microseconds. Ratio: time of a device copy of the same bytes over the step's. Issue: of the host.",
    {
        "list": text("list"),
        "optimizer": text("optimizer"),
        "gradients": text("gradients"),
        "bytes/element": number("bytes_per_element", 2),
        "step us": number("step"),
        "copy us": number("copy"),
        "ratio": number("ratio", 2),
        "issue us": number("issue"),
    },
)


def main(out: Path | None = None, repeats: int = 15) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    REPORT.publish(rows(repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
