"""What a function of tensors does on a GPU, recorded once and played again on other tensors.

[Note: Tapes]
A pass of a linear map is a handful of allocations and launches. To find out which ones (formats, regions, layouts,
checks, grids) costs the CPU more than to issue them, and the answer is the same every time. So a function is recorded
while it runs in the ordinary way: allocations, ops of torch, and launches, whose parameters are numbers and addresses.
On tensors of the same types, shapes, strides and alignments the tape does the same again with other addresses, and
Python decides nothing. What is recorded may therefore depend on these, and on what the caller puts into the key of a
tape, but on no values. Ops that are called one by one have tapes too (`ops._taped`).

To record costs more than to run. So a function is recorded when it is called for the second time with tensors of the
same kind; the first time where most of the latest tapes were played, and much later where none was. Kept are those that
were recorded or played last: shapes that do not come again have none. Layers of a model share theirs, since nearly all
that one of them is given comes again in the next.

Collectives that were called through `communicate` are called again whenever a tape is played, in their order: a rank
may play what another one records, or runs in the ordinary way.

A tape stays blank, and its function always runs in the ordinary way, where something else happened: another
collective, a tensor from elsewhere, an address that no tensor of the function holds. Tensors that overlap, CPU tensors,
subclasses of tensors (those of compilers among them) and blocks in which torch's dispatch is watched are not recorded
at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from te_dist import _C
from te_dist._torch_private import QuickDispatchMode, current_cuda_stream, is_dispatch_watched, is_mutable
from te_dist.kernels.runtime import ALIGNMENT, Launch, listening

_WORKSPACE_ALIGNMENT = 512  # bytes, as torch aligns allocations
_MAX_TAPES = 64  # of an owner that says nothing else
# Of the latest recordings, the newer of which have had no time to be played; and those by which it is judged whether
# what is recorded comes again. A layer has fewer.
_LATEST, _JUDGED = 32, 16
_RARELY = 8  # calls before a recording where the latest were in vain
PLAIN = (Tensor, torch.nn.Parameter)  # classes of tensors that are recorded


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """As `aten::slice`."""
    return x[(*(slice(None),) * (dim % x.dim()), slice(start, end, step))]


# The same without a look-up of overloads, which takes several times as long. (`_unsafe_view` is no view to autograd.)
_VIEWS = {
    torch.ops.aten.as_strided.default: Tensor.as_strided,
    torch.ops.aten.select.int: Tensor.select,
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.t.default: Tensor.t,
    torch.ops.aten.view.default: Tensor.view,
    torch.ops.aten.view.dtype: Tensor.view,
}
_QUICK = _VIEWS | {
    torch.ops.aten.arange.default: torch.arange,
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.clone.default: torch.clone,
    torch.ops.aten.copy_.default: Tensor.copy_,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.random_.to: Tensor.random_,
    torch.ops.aten.split_with_sizes.default: torch.split_with_sizes,
    torch.ops.aten.zero_.default: Tensor.zero_,
}
_EMPTY = torch.ops.aten.empty.memory_format
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # without autograd, their argument itself

_recorder: ContextVar[_Recorder | None] = ContextVar("te_dist_recorder", default=None)

Program = _C.cuda.Program

Result = tuple[tuple[Tensor, ...], Any]


class Tapes:
    """The tapes of one owner, such as a module: `max_tapes` of those that were recorded or played last."""

    def __init__(self, max_tapes: int = _MAX_TAPES) -> None:
        self._max_tapes = max_tapes
        self._tapes: dict[Hashable, _Tape | None] = {}  # None: ran, and cannot be recorded
        self._runs: dict[Hashable, int] = {}  # how often what has no tape ran
        self._latest: deque[_Tape | None] = deque(maxlen=_LATEST)

    def run(self, key: Hashable, tensors: tuple[Tensor, ...], function: Callable[[], Result]) -> Result:
        """What `function` returns: tensors, and something else, which is the same for equal keys.

        It runs in the ordinary way while a compiler traces it.

        Args:
            key: what the function depends on besides `tensors`. It does not depend on torch's autocast.
            tensors: all that it reads or writes.
        """
        if torch.compiler.is_compiling() or not is_recordable(tensors[0]):
            return function()
        signature = _C.cuda.signature(tensors, PLAIN, ALIGNMENT)
        if signature is None:
            return function()
        place = (signature, key)
        tape = self._tapes.get(place)
        if tape is not None:
            if len(self._tapes) == self._max_tapes:  # others may be dropped soon
                self._tapes.pop(place, None)
                self._tapes[place] = tape
            return tape.play(tensors)
        if place in self._tapes:
            return function()
        runs = self._runs.get(place, 0)
        if runs >= self._patience():
            return self._recorded(place, tensors, function)
        result = function()
        self._keep(self._runs, place, runs + 1)
        return result

    def _recorded(self, place: Hashable, tensors: tuple[Tensor, ...], function: Callable[[], Result]) -> Result:
        recorder = _Recorder(tensors)
        if recorder.overlaps:  # others of the same kind may not
            return function()
        token = _recorder.set(recorder)
        try:
            with recorder, listening(recorder.launched):
                result = function()
        finally:
            _recorder.reset(token)
        self._runs.pop(place, None)
        tape = recorder.tape(*result)
        self._keep(self._tapes, place, tape)
        self._latest.append(tape)
        return result

    def _patience(self) -> int:
        """How often a function runs before it is recorded."""
        latest = tuple(self._latest)
        if len(latest) < _LATEST:
            return 1
        played = sum(tape is not None and tape.was_played for tape in latest[:_JUDGED])
        return 0 if played > _JUDGED // 2 else 1 if played else _RARELY

    def _keep(self, entries: dict[Hashable, Any], place: Hashable, entry: _Tape | int | None) -> None:
        """Adds an entry, and drops the oldest of too many. (Threads of autograd may do the same meanwhile.)"""
        entries[place] = entry
        while len(entries) > self._max_tapes:
            with suppress(RuntimeError, StopIteration):
                entries.pop(next(iter(entries)), None)


def is_recordable(tensor: Tensor) -> bool:
    """Whether what is done now to tensors, the first of which is this one, can be recorded."""
    return tensor.is_cuda and not is_dispatch_watched()


def communicate(collective: Callable[..., None], *tensors: Tensor) -> None:
    """Calls `collective`, which reads and writes these tensors and no others; a tape that is recorded calls it again.

    It may keep nothing that a tape must not keep alive, as tensors.
    """
    recorder = _recorder.get()
    if recorder is None:
        collective(*tensors)
    else:
        recorder.communicated(collective, tensors)


class _Slot(NamedTuple):
    """A tensor, by its place among those of a tape."""

    number: int


@final
class _Allocation(NamedTuple):
    """A contiguous tensor."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    """An op of torch, or a collective.

    Attributes:
        outputs: slots of the tensors that it returns.
        writes: whether it writes into its arguments.
    """

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[int]
    writes: bool

    def play(self, device: torch.device, slots: list[Any]) -> None:
        """Calls it. It was recorded behind torch's autocast, which must not convert its arguments again."""
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                return self._call(slots)
        return self._call(slots)

    def _call(self, slots: list[Any]) -> None:
        out = self.op(*_filled(self.args, slots), **{k: _filled(v, slots) for k, v in self.kwargs.items()})
        if out is not None:
            for slot, tensor in zip(self.outputs, (out,) if isinstance(out, Tensor) else out, strict=True):
                slots[slot] = tensor


@final
class _View(NamedTuple):
    """A call of an op in `_VIEWS`, which autocast has nothing to do with."""

    op: Any
    source: int
    args: tuple[Any, ...]
    slot: int


class _Launched(NamedTuple):
    """A launch; `addresses`: (place in its values, slot, bytes behind the start of the tensor)."""

    launch: Launch
    addresses: list[tuple[int, int, int]]


@final
class _Launches:
    """Launches without a call between them, issued together."""

    def __init__(self, launches: Sequence[_Launched]) -> None:
        self._launches = launches
        self._slots = list(dict.fromkeys(slot for step in launches for _, slot, _ in step.addresses))
        self.program = Program([self._step(*step) for step in launches], self._slots)

    def _step(self, launch: Launch, addresses: list[tuple[int, int, int]]) -> tuple[Any, ...]:
        """As a `Program` takes it."""
        layout, index = launch.layout, self._slots.index
        patches = [(layout.offsets[p], index(slot), offset, layout.is_map(p)) for p, slot, offset in addresses]
        return launch.kernel, launch.grid, layout.pack(*launch.values), patches

    def failed(self, error: RuntimeError, slots: list[Any]) -> RuntimeError:
        """The error of a run of `program` with the tensors `slots`, with the values that were launched with."""
        launch, places = self._launches[self.program.position]
        values = list(launch.values)
        for place, slot, offset in places:
            values[place] = slots[slot].data_ptr() + offset
        return launch.failed(error, values)


@dataclass(eq=False, slots=True)
class _Tape:
    device: torch.device
    num_slots: int
    steps: list[_Allocation | _Call | _View | _Launches]
    outputs: list[int]
    rest: Any
    was_played: bool = False

    def play(self, tensors: Sequence[Tensor]) -> Result:
        """The recorded function on other tensors."""
        device, self.was_played = self.device, True
        slots: list[Any] = [*tensors, *[None] * (self.num_slots - len(tensors))]
        for step in self.steps:
            if type(step) is _Allocation:
                slot, shape, strides, dtype = step
                # NOTE: half the time of `torch.empty`.
                slots[slot] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            elif type(step) is _View:
                op, source, args, slot = step
                slots[slot] = op(slots[source], *args)
            elif type(step) is _Launches:
                try:
                    step.program.run(device.index, current_cuda_stream(device.index), slots)
                except RuntimeError as error:
                    raise step.failed(error, slots) from None
            else:
                step.play(device, slots)
        return tuple([slots[slot] for slot in self.outputs]), self.rest


def _filled(value: Any, slots: list[Any]) -> Any:
    """`value` with tensors in the place of slots."""
    if type(value) is _Slot:
        return slots[value.number]
    return [_filled(item, slots) for item in value] if type(value) is list else value


class _Recorder(QuickDispatchMode):
    """Writes a tape while a function runs."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)  # by slot; kept, so that no address is given out twice
        self._slots = {id(tensor): slot for slot, tensor in enumerate(tensors)}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._aliases: list[Tensor] = []  # kept like the others
        self._communicates = False  # what torch does meanwhile is not looked at
        self._steps: list[_Allocation | _Call | _Launched] = []
        self._ranges = dict(enumerate(map(_range, tensors)))  # by slot, of tensors that are no views of others
        # An address does not tell apart tensors that lie in one place; one without elements, or freed, has none.
        self._is_blank = any(
            tensor.numel() == 0 or tensor.data_ptr() == 0 or tensor.device != tensors[0].device for tensor in tensors
        )
        ordered = sorted(self._ranges.values())
        self.overlaps = any(a[1] > b[0] for a, b in zip(ordered, ordered[1:], strict=False)) and not self._is_blank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._communicates:
            return out
        if func is _EMPTY and out.is_contiguous():
            self._record_allocation(out)
        elif func.namespace != "te_dist":  # the launches of its ops are recorded
            made = list(out) if isinstance(out, tuple | list) else [] if out is None else [out]
            known = func.namespace == "aten" and all(kind in PLAIN for kind in types)
            if known and all(isinstance(tensor, Tensor) for tensor in made):
                self._record(func, args, kwargs, made)
            else:
                self._is_blank = True
        return out

    def _record_allocation(self, tensor: Tensor) -> None:
        slot, address = len(self._tensors), tensor.data_ptr()
        self._slots[id(tensor)] = slot
        self._tensors.append(tensor)
        self._storages.add(address)
        self._ranges[slot] = address, address + tensor.nbytes
        self._is_blank |= address == 0 or tensor.device != self._tensors[0].device
        self._steps.append(_Allocation(slot, tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def communicated(self, collective: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        """Calls a collective and records the call."""
        self._communicates = True
        try:
            collective(*tensors)
        finally:
            self._communicates = False
        self._steps.append(_Call(collective, self._by_slot(list(tensors)), {}, [], writes=True))

    def launched(self, launch: Launch) -> None:
        """Records a launch."""
        addresses = []
        for place in launch.layout.addresses:
            value = launch.values[place]
            address = value if isinstance(value, int) else getattr(value, "address", -1)
            if address == 0:
                continue
            held = [(slot, start) for slot, (start, end) in self._ranges.items() if start <= address < end]
            if len(held) != 1:
                self._is_blank = True
                return
            ((slot, start),) = held
            addresses.append((place, slot, address - start))
        self._steps.append(_Launched(launch, addresses))

    def tape(self, outputs: Sequence[Tensor], rest: Any) -> _Tape | None:
        """What was recorded, without what nothing comes of; None where it cannot be played."""
        if self._is_blank or any(id(tensor) not in self._slots for tensor in outputs):
            return None
        results = [self._slots[id(tensor)] for tensor in outputs]
        needed, steps = set(results), []
        for step in reversed(self._steps):
            if isinstance(step, _Launched):
                needed.update(slot for _, slot, _ in step.addresses)
            elif isinstance(step, _Call) and (step.writes or not needed.isdisjoint(step.outputs)):
                needed.update(_slots_in([step.args, *step.kwargs.values()]))
            elif isinstance(step, _Call) or step.slot not in needed:
                continue
            steps.append(step)
        steps = self._with_one_workspace(steps[::-1], set(results))
        return _Tape(self._tensors[0].device, len(self._tensors) + 1, _together(steps), results, rest)

    def _with_one_workspace(
        self, steps: list[_Allocation | _Call | _Launched], outputs: set[int]
    ) -> list[_Allocation | _Call | _Launched]:
        """The steps with one allocation in front for all tensors that nothing but launches use."""
        kept = outputs.union(*(step.outputs for step in steps if isinstance(step, _Call)))
        kept.update(
            slot for step in steps if isinstance(step, _Call) for slot in _slots_in([step.args, *step.kwargs.values()])
        )
        workspace, offsets, size = len(self._tensors), {}, 0
        for step in steps:
            if isinstance(step, _Allocation) and step.slot not in kept:
                offsets[step.slot] = size
                size += -(-self._tensors[step.slot].nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        if not offsets:
            return steps
        moved: list[_Allocation | _Call | _Launched] = [_Allocation(workspace, (size,), (1,), torch.uint8)]
        for step in steps:
            if isinstance(step, _Launched):
                places = ((p, workspace, o + offsets[s]) if s in offsets else (p, s, o) for p, s, o in step.addresses)
                moved.append(_Launched(step.launch, list(places)))
            elif not (isinstance(step, _Allocation) and step.slot in offsets):
                moved.append(step)
        return moved

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> None:
        if func in _SAME and id(args[0]) in self._slots:
            self._slots[id(made[0])] = self._slots[id(args[0])]
            self._aliases.append(made[0])
            return
        storages = [tensor.untyped_storage().data_ptr() for tensor in made]
        arguments, keywords = self._by_slot(list(args)), {name: self._by_slot(v) for name, v in kwargs.items()}
        slots = [self._slot(*each) for each in zip(made, [s not in self._storages for s in storages], strict=True)]
        self._storages.update(storages)
        self._steps.append(_Call(_QUICK.get(func, func), arguments, keywords, slots, is_mutable(func)))

    def _by_slot(self, value: Any) -> Any:
        """`value` with slots in the place of tensors."""
        if isinstance(value, Tensor):
            self._is_blank |= id(value) not in self._slots
            return _Slot(self._slots.get(id(value), 0))
        return [self._by_slot(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _slot(self, tensor: Tensor, is_root: bool) -> int:
        """That of a tensor; a new one has a place in memory of its own unless it is a view."""
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._is_blank |= tensor.numel() == 0 or tensor.device != self._tensors[0].device
            if is_root:
                self._ranges[slot] = _range(tensor)
        return slot


def _together(
    steps: Sequence[_Allocation | _Call | _Launched],
) -> list[_Allocation | _Call | _View | _Launches]:
    """The same steps; between calls first all allocations, then all launches as one."""
    together: list[_Allocation | _Call | _View | _Launches] = []
    launches: list[_Launched] = []
    for step in steps:
        if isinstance(step, _Launched):
            launches.append(step)
        elif isinstance(step, _Allocation):
            together.append(step)
        else:
            its = _as_view(step)
            together += [_Launches(launches), its] if launches else [its]
            launches = []
    return [*together, _Launches(launches)] if launches else together


def _as_view(call: _Call) -> _Call | _View:
    """The same call, as what takes less time where it is that."""
    if call.op not in _VIEWS.values() or call.kwargs or _slots_in(call.args[1:]) or len(call.outputs) != 1:
        return call
    source, *rest = call.args
    return _View(call.op, source.number, tuple(rest), call.outputs[0])


def _range(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _slots_in(value: Any) -> list[int]:
    """All slots of a nested list."""
    if type(value) is _Slot:
        return [value.number]
    return [slot for item in value for slot in _slots_in(item)] if type(value) is list else []
