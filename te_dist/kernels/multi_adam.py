"""Launches of Adam over many tensors. See te_dist.ops.multi_adam."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist.kernels.arguments import ELEMENTS, access_bytes, pointer
from te_dist.kernels.inputs import adam
from te_dist.kernels.multi_tensor import Launches, Pointers, Work, reading, reading_blocks, upload
from te_dist.kernels.runtime import launch
from te_dist.kernels.spec import Layout, Spec, once
from te_dist.kernels.task import Task, Widths

_WIDE, _NARROW = 16, 4  # bytes accessed at a time
_OCTET = 8  # elements of a row that a thread updates
_ADVANCE_THREADS = 128
_FACTORS = 10  # floats of `AdamFactors`
_RULE_FIELDS = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "corrected")
_RULE = " ".join(f"rule.{name}:d" for name in _RULE_FIELDS)
_SIGNALS = " ".join(f"signals.{name}:P" for name in ("lr", "grad_scale", "found_inf"))
ADVANCE = Spec("adam.cuh", "AdvanceSteps", Layout(f"{_RULE} {_SIGNALS} steps:P factors:P count:q is_left_out:P"))
_NOISE = " ".join(f"noise.{name}:Q" for name in ("seed", "number", "origin", "width", "pitch"))
_COMPACT = Layout(
    "value:P remainder:P exp_avg:P exp_avg_scale:P exp_avg_sq:P exp_avg_sq_scale:P grad:P factors:P step:P copy:P "
    f"rows:q cols:q {_NOISE}"
)
_COMPACT_VALUES = 8192  # of a block of threads, where rows are whole blocks of values
MOMENT_BLOCK = 128  # values of a row that share a scale


@once
def compact(types: tuple[str, ...], widths: Widths) -> Spec:
    """Spec of Adam whose state is kept in fewer bytes; `types`: of the gradient, of what is updated and how it is kept,
    of the moments, and of a copy or Nothing."""
    wide = "true" if widths[0] == _WIDE else "false"
    return Spec("adam_compact.cuh", f"AdamCompact<{', '.join(types)}, {wide}>", _COMPACT)


class CompactPlace(NamedTuple):
    """What is known of a tensor whose state is kept in fewer bytes.

    Attributes:
        exp_avg_scale, exp_avg_sq_scale: f32, of each block of each row; None where the moment is not in bytes.
        remainder: 16 bits each, of a bf16 value.
        by_chance: whether a value is rounded so.
        shape: rows and columns; blocks lie in rows.
        noise: seed, number of the parameter, place of its first element in the whole, elements of a row here and there.
    """

    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    remainder: Tensor | None
    by_chance: bool
    shape: tuple[int, int]
    noise: tuple[int, int, int, int, int]

    @property
    def keep(self) -> str | None:
        """How the value is kept, as C++; None where it is rounded to nearest."""
        return "Remainder" if self.remainder is not None else "Stochastic" if self.by_chance else None


class Piece(NamedTuple):
    """A part of a tensor that Adam updates, and of what it updates it by, all flat or of one shape.

    copy takes the updated value too. task is done with it meanwhile. step is that of the tensor. place: where its state
    is kept in fewer bytes.
    """

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    copy: Tensor | None
    task: Task | None
    place: CompactPlace | None = None


class AdamLaunches:
    """Adam over groups of tensors.

    Args:
        groups: of every tensor of each group its pieces, which lie one behind the other in it and in its gradient.
        grads: of all tensors, group by group; others may come later, of the same dtypes and alignments.
        noop: int32 (1,), set where a step is left out.
    """

    def __init__(self, groups: Sequence[Sequence[Sequence[Piece]]], grads: Sequence[Tensor], noop: Tensor) -> None:
        tensors = [pieces for group in groups for pieces in group]
        device = noop.device
        self._counts, self._noop = [len(group) for group in groups], noop
        self._factors = torch.empty(len(tensors), _FACTORS, device=device)
        steps = torch.tensor([pieces[0].step.data_ptr() for pieces in tensors], dtype=torch.int64)
        self._steps = upload(steps.numpy().tobytes(), device).view(torch.int64)
        # Of each piece its tensor, and at which byte of the gradient it begins.
        self._places = [place for index, own in enumerate(tensors) for place in _places(index, own, grads[index])]
        self._grads = Pointers(len(self._places), device)
        pieces = [piece for own in tensors for piece in own]
        works = [self._work(number, piece, grads) for number, piece in enumerate(pieces) if piece.value.numel()]
        self._launches = Launches(works, self._noop)

    def run(
        self,
        grads: Sequence[Tensor],
        rules: Sequence[tuple[float, ...]],
        signals: Sequence[tuple[Tensor | None, ...]],
    ) -> None:
        """Counts the steps and updates. `signals`: lr, grad_scale and found_inf of each group."""
        addresses = [grad.data_ptr() for grad in grads]
        self._grads.write([addresses[index] + start for index, start in self._places])
        first = 0
        for count, rule, own in zip(self._counts, rules, signals, strict=True):
            if count:
                steps, factors = self._steps[first:].data_ptr(), self._factors[first:].data_ptr()
                values = (*rule, *map(pointer, own), steps, factors, count, self._noop.data_ptr())
                launch(ADVANCE, self._factors, (-(-count // _ADVANCE_THREADS), 1), values)
            first += count
        self._launches.run()

    def _work(self, number: int, piece: Piece, grads: Sequence[Tensor]) -> Work:
        if piece.place is not None:
            return self._compact_work(number, piece, piece.place, grads)
        value, exp_avg, exp_avg_sq, _, copy, task, _ = piece
        index, start = self._places[number]
        grad = grads[index]
        source = adam(ELEMENTS[grad.dtype], ELEMENTS[value.dtype])
        moments = (exp_avg.data_ptr(), exp_avg_sq.data_ptr())
        own = (value.data_ptr(), *moments, self._grads.address(number), self._factors[index].data_ptr())
        addresses = (*own[:3], grad.data_ptr() + start, pointer(copy))
        if task is None:
            wide = _width(addresses, value.numel())
            kernel = partial(reading, source, copy=ELEMENTS[copy.dtype] if copy is not None else "Nothing")
            return Work(kernel, (wide,), (_NARROW,), reading_blocks(value), (*own, value.numel(), pointer(copy)))
        assert copy is None
        _, cols, _, phase = task.values[:4]
        widths = (_width(addresses, int(cols), int(phase)), *task.widths[1:])
        kernel = partial(task.kernel, source)
        return Work(kernel, widths, (_NARROW, *task.narrowest[1:]), task.blocks, (*own, *task.values))

    def _compact_work(self, number: int, piece: Piece, place: CompactPlace, grads: Sequence[Tensor]) -> Work:
        value, exp_avg, exp_avg_sq, step, copy, _, _ = piece
        index, _ = self._places[number]
        grad, (rows, cols) = grads[index], place.shape
        types = (
            ELEMENTS[grad.dtype],
            place.keep or f"Nearest<{ELEMENTS[value.dtype]}>",
            *(_moment(moment) for moment in (exp_avg, exp_avg_sq)),
            ELEMENTS[copy.dtype] if copy is not None else "Nothing",
        )
        state = (pointer(value), pointer(place.remainder), exp_avg.data_ptr(), pointer(place.exp_avg_scale))
        state += (exp_avg_sq.data_ptr(), pointer(place.exp_avg_sq_scale))
        computed = (self._grads.address(number), self._factors[index].data_ptr(), step.data_ptr(), pointer(copy))
        # NOTE: eight bytes of codes are read at a time where 16 of other types are: twice their address counts.
        addresses = (
            *state[:2],
            *(_aligned_as(moment) for moment in (exp_avg, exp_avg_sq)),
            grad.data_ptr(),
            computed[-1],
        )
        blocks = rows * -(-cols // MOMENT_BLOCK)
        per_block = _COMPACT_VALUES // MOMENT_BLOCK
        values = (*state, *computed, rows, cols, *place.noise)
        kernel = partial(compact, types)
        return Work(kernel, (_width(addresses, cols),), (_NARROW,), -(-blocks // per_block), values)


def _moment(moment: Tensor) -> str:
    return "MomentBytes" if moment.dtype == torch.uint8 else f"Moment<{ELEMENTS[moment.dtype]}>"


def _aligned_as(moment: Tensor) -> int:
    return moment.data_ptr() * (2 if moment.dtype == torch.uint8 else 1)


def _places(index: int, pieces: Sequence[Piece], grad: Tensor) -> list[tuple[int, int]]:
    """Of each piece of a tensor the number of that, and at which byte of the gradient it begins."""
    starts = accumulate((piece.value.numel() for piece in pieces[:-1]), initial=0)
    return [(index, start * grad.element_size()) for start in starts]


def _width(addresses: tuple[int, ...], *extents: int) -> int:
    aligned = access_bytes(_WIDE, *addresses) == _WIDE and access_bytes(_OCTET, *extents) == _OCTET
    return _WIDE if aligned else _NARROW
