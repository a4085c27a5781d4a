"""One launch for any number of matrices: their parameters lie on the device, blocks of threads find their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from te_dist.kernels.arguments import ELEMENTS
from te_dist.kernels.inputs import Source, layout, read
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once
from te_dist.kernels.task import Task, Widths

_MULTI_TENSOR = Layout("each:P ends:P count:q noop:P")
_WORD_BYTES = 8


@once
def multi_tensor(each: Spec) -> Spec:
    """Spec of a launch for many matrices; `each`: of the kernel for one."""
    headers = f"adam.cuh {each.file} multi_tensor.cuh"
    return Spec(headers, f"MultiTensor<{each.template}>", _MULTI_TENSOR, each=each)


_READING_ELEMENTS = 8192  # of a block of threads


@once
def reading(source: Source, widths: Widths, *, copy: str) -> Spec:
    """Spec of what reads a tensor and does no more with it; `copy`: element type of a copy, or Nothing."""
    constants = f"{source.template}, {copy}, {widths[0]}"
    return Spec("pass.cuh", f"Pass<{constants}>", layout(source, "count:q copy:P"))


def reading_blocks(tensor: Tensor) -> int:
    """Blocks of threads that read a tensor so."""
    return -(-tensor.numel() // _READING_ELEMENTS)


def copy_task(target: Tensor, source: Tensor) -> Task:
    """A copy of one contiguous tensor to another of as many elements."""
    size = source.element_size()
    kernel = partial(reading, copy=ELEMENTS[target.dtype])
    values = (source.numel(), target.data_ptr())
    return Task(read(source.view(1, -1), "plain", ()), kernel, (size,), (size,), reading_blocks(source), values)


class Work(NamedTuple):
    """One matrix of a launch for many.

    Attributes:
        kernel: spec, for one matrix, by the bytes accessed at a time.
        widths: the widest accesses that all addresses allow.
        narrowest: accesses that any address allows.
        blocks: number of blocks of threads.
        values: of all parameters of the kernel.
    """

    kernel: Callable[[Widths], Spec]
    widths: Widths
    narrowest: Widths
    blocks: int
    values: tuple[int | float, ...]


class Launches:
    """Works of any number as two launches, at most, for each kind of kernel among them.

    Addresses are those of the moment: whoever keeps this keeps the tensors.

    Args:
        works: in any order; they do not depend on each other.
        noop: 32 bits on the device; where one is set nothing is done.
    """

    def __init__(self, works: Sequence[Work], noop: Tensor) -> None:
        self._noop = noop
        self._parameters: list[tuple[Spec, int, tuple[int, int, int]]] = []
        parts, position = [], 0
        for each, chosen in kinds(works).items():
            ends = np.fromiter(accumulate(work.blocks for work in chosen), np.int64, len(chosen))
            parts += [*(each.layout.pack(*work.values) for work in chosen), ends.tobytes()]
            table = sum(map(len, parts[-len(chosen) - 1 : -1]))
            self._parameters.append((multi_tensor(each), int(ends[-1]), (position, position + table, len(chosen))))
            position += table + ends.nbytes
        self._table = upload(b"".join(parts), noop.device)

    def run(self) -> None:
        """Launches on the current stream."""
        base, noop = self._table.data_ptr(), self._noop.data_ptr()
        for spec, blocks, (each, ends, count) in self._parameters:
            launch(spec, self._table, (blocks, 1), (base + each, base + ends, count, noop))


def kinds(works: Sequence[Work]) -> dict[Spec, list[Work]]:
    """By kernel, what it works on: of one kind those of the accesses that most blocks allow, and the narrowest."""
    blocks: dict[Spec, Counter[Spec]] = {}
    for work in works:
        blocks.setdefault(work.kernel(work.narrowest), Counter())[work.kernel(work.widths)] += work.blocks
    found: dict[Spec, list[Work]] = {}
    for work in works:
        narrowest, own = work.kernel(work.narrowest), work.kernel(work.widths)
        ((most, _),) = blocks[narrowest].most_common(1)
        found.setdefault(own if own == most else narrowest, []).append(work)
    return found


def upload(content: bytes, device: torch.device) -> Tensor:
    """Bytes on the device, in the order of the current stream; the host does not wait."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("many tensors would be prepared for a launch under CUDA graph capture; run it once before")
    staging = torch.empty(max(1, len(content)), dtype=torch.uint8, pin_memory=True)
    staging.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
    return staging.to(device, non_blocking=True)


class Pointers:
    """Addresses on the device that change from time to time.

    Writing them neither waits for the device nor allocates on it. Staging memory is a new one every time, and torch's
    allocator does not hand out again what a copy still reads. A copy that a graph has captured reads its staging
    memory at every replay, and overwrites what was written outside of it: from then on addresses are written always.
    """

    table: Tensor  # int64 (count,)

    def __init__(self, count: int, device: torch.device) -> None:
        self.table = torch.zeros(count, dtype=torch.int64, device=device)
        self._written: list[int] = []
        self._spare = self._staging()
        self._captured: list[Tensor] = []

    def address(self, index: int) -> int:
        """Where the address at `index` lies."""
        return self.table.data_ptr() + _WORD_BYTES * index

    def write(self, pointers: list[int]) -> None:
        """Replaces all of them."""
        if torch.cuda.is_current_stream_capturing():
            staging = self._spare
            if any(staging is used for used in self._captured):
                raise RuntimeError("two graphs are captured with no step in between; run one step before each capture")
            self._captured.append(staging)
        elif pointers == self._written and not self._captured:
            return
        else:
            if self._captured and self._spare is self._captured[-1]:
                self._spare = self._staging()
            staging = self._staging()
        staging.numpy()[:] = pointers
        self.table.copy_(staging, non_blocking=True)
        self._written = pointers

    def _staging(self) -> Tensor:
        return torch.empty(self.table.shape, dtype=torch.int64, pin_memory=True)
