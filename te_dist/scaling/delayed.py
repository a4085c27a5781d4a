"""Delayed scaling's state: amax histories as ordinary module buffers, brought up to date once per backward pass.

[Note: When histories move]
Forward quantizes inputs, backward quantizes gradients, each by the scale of the step before, and both leave their amax
in `running`. When backward ends, all states that it came by move on together: one reduction of all amaxes per process
group, one update of all scales. Forward passes that backward runs again (activation checkpointing) thus see the scales
of the first time. Where that ends in a backward pass inside the outer one (reentrant checkpointing), the end of the one
in which the map was run again first counts. What a backward pass came by that failed moves with the next step of its
own. With several forward passes before the first backward (pipelines) the first end moves histories; forward
passes that are run again after that see the newer scales. A forward pass that no backward pass comes by, on one rank or
on all, moves nothing; its amaxes count in the next step of its map. Passes without gradients leave no trace. Models
that several threads of a process train at once move each other's histories on.

[Note: What ranks reduce]
Ranks may take the maps of a model in other orders, or others of them, as their batches have it. So amaxes are not
reduced in the order in which backward came by: of a model that was prepared (`prepare`) all have a place, in the order
of the model, and zeros where this rank has none, which move nothing. A place stays, whatever becomes of its map, and
maps that are prepared later come behind. Of states that nobody prepared those are reduced that were reached, in the
order in which their maps were made. A rank whose backward pass comes by none at all reduces nothing, and the others
would wait for it.

[Note: Beside the buffers]
What a step collects is in no buffer. DistributedDataParallel overwrites the buffers of all ranks by those of rank 0 in
front of every forward pass, which is in the midst of a step where two passes come before one backward. And `to_empty`
and `load_state_dict(assign=True)` leave a buffer that no checkpoint holds without values.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist import _torch_private, ops
from te_dist.kernels.tape import Result, Tapes
from te_dist.quantizers import Float8Quantizer
from te_dist.scaling.history import DelayedScalingRequest
from te_dist.tensor import traffic
from te_dist.tensor.tally import Tallying, tally_on


class Siblings:
    """States of one model, each in its place, see [Note: What ranks reduce]. Copies have siblings of their own.

    Attributes:
        number: higher than those of models that were prepared before.
        sizes: by place, how many amaxes a state has that ranks share; 0 where they share none.
    """

    _numbers = count(1)

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self.number = next(self._numbers)
        self.sizes = list(sizes)
        self._states: list[weakref.ref[DelayedScalingState] | None] = [None] * len(self.sizes)

    @staticmethod
    def join(states: Iterable[DelayedScalingState]) -> None:
        """Makes states siblings, and those that they have already; new ones come behind, in this order."""
        states = list(states)
        known = list(dict.fromkeys(state.siblings for state in states if state.siblings is not None))
        if not states:
            return
        first = known[0] if known else Siblings()
        for other in known[1:]:
            first._absorb(other)
        for state in states:
            if state.siblings is None:
                first._append(state.scale.numel() if state.reduces_amax else 0, state)

    def _absorb(self, other: Siblings) -> None:
        for place, size in enumerate(other.sizes):
            self._append(size, other.at(place))

    def _append(self, size: int, state: DelayedScalingState | None) -> None:
        """A place behind all others; None: its state is gone."""
        self.sizes.append(size)
        self._states.append(None)
        if state is not None:
            self.put(state, len(self.sizes) - 1)

    def put(self, state: DelayedScalingState, place: int) -> None:
        """Gives a state its place."""
        state.siblings, state.place = self, place
        self._states[place] = weakref.ref(state)

    def at(self, place: int) -> DelayedScalingState | None:
        """The state in a place, if it is there."""
        found = self._states[place]
        return None if found is None else found()

    def __deepcopy__(self, memo: Any) -> Siblings:
        return Siblings(self.sizes)  # copies of the states come by themselves

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return Siblings, (self.sizes,)


class DelayedScalingState(Tallying):
    """Scales and amax histories of the tensors of one module that asked for delayed scaling.

    Attributes:
        requests: by name of a tensor ("input", "grad_output"), what it asked for.
        num_groups: scales of each: rows in groups have one for every group. Columns of the buffers come tensor by
            tensor.
        number: of its map, higher than those of maps that were made before.
        siblings, place: of the model that was prepared, and where among them; None and 0 where none was.
        scale: f32 (n,).
        amax_history: f32 (length, n), see `ops.advance_histories`; row 0 is zero.
    """

    scale: Tensor
    amax_history: Tensor
    siblings: Siblings | None = None
    place: int = 0

    def __init__(
        self,
        requests: Mapping[str, DelayedScalingRequest],
        *,
        device: torch.device | str,
        num_groups: int = 1,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.requests, self.num_groups, self.number = dict(requests), num_groups, number
        lengths = {r.amax_history_len for r in requests.values()}
        rules = {(r.amax_compute_algo, r.reduce_amax) for r in requests.values()}
        if len(lengths) != 1 or len(rules) != 1:
            raise ValueError(
                f"tensors of one module need one history length, algorithm and reduction, got {list(requests.values())}"
            )
        (length,) = lengths
        columns = len(requests) * num_groups
        self.register_buffer("scale", torch.empty(columns, dtype=torch.float32, device=device))
        self.register_buffer("amax_history", torch.empty(length, columns, dtype=torch.float32, device=device))
        self._running = torch.zeros_like(self.scale)
        self._scaled_max = self._find_scaled_max()
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.siblings is not None:
            self.siblings.put(self, self.place)

    def reset_parameters(self) -> None:
        """Scales of 1 and empty histories."""
        self.scale.fill_(1.0)
        self.amax_history.zero_()
        self.clear_tally()

    def clear_tally(self) -> None:
        _recording.pop(self, None)
        _reached.pop(self, None)
        self._running.zero_()

    @cached_property
    def algo(self) -> Literal["max", "most_recent"]:
        """As all of them ask."""
        return next(iter(self.requests.values())).amax_compute_algo

    @cached_property
    def reduces_amax(self) -> bool:
        """Whether ranks are to share scales, if they are given a group."""
        return next(iter(self.requests.values())).reduce_amax

    @property
    def running(self) -> Tensor:
        """f32 (n,), amaxes of the running step, where the scales are. See [Note: Beside the buffers]."""
        device, found = self.scale.device, self._running
        if found.device != device:
            found = tally_on(device, found)
            if not found.is_meta:  # of a rehearsal nothing is left
                self._running = found
        return found

    @property
    def scaled_max(self) -> Tensor:
        """f32 (n,), what the largest magnitude is scaled to, where the scales are; follows from the requests."""
        found = self._scaled_max
        if found.device != self.scale.device:
            found = self._find_scaled_max()
            if not found.is_meta:
                self._scaled_max = found
        return found

    @torch.inference_mode(False)
    def _find_scaled_max(self) -> Tensor:
        found = torch.empty_like(self.scale)
        for columns, request in zip(self._columns(), self.requests.values(), strict=True):
            found[columns] = request.scaled_max
        return found

    def _columns(self) -> list[slice]:
        """Of every tensor."""
        return [slice(i * self.num_groups, (i + 1) * self.num_groups) for i in range(len(self.requests))]

    def take_part(self, group: dist.ProcessGroup | None) -> None:
        """Says that amaxes are recorded here: histories move at the end of a backward pass that comes by.

        Args:
            group: ranks that take the largest amax of all, None for this rank alone.
        """
        _recording[self] = group if self.reduces_amax else None

    def begin_pass(self) -> None:
        """Called in a forward pass that backward does not run again: no backward pass comes by at this time."""
        if _reached:
            _reached.pop(self, None)  # of one that failed

    def move_when_backward_ends(self) -> None:
        """Called in a backward pass that has come by, or in which this runs again: the first one's end counts."""
        number = _torch_private.number_of_backward()
        if _reached.setdefault(self, number) == number and number not in _asked:
            _asked.add(number)
            _torch_private.call_when_backward_ends(lambda: _end(number))

    def quantizers(self, *, records: bool) -> dict[str, Float8Quantizer]:
        """By name, quantizers that use what scales are at the time. `records`: whether they keep amaxes."""
        return {
            name: Float8Quantizer(self.scale[its], self.running[its] if records else None, request.fp8)
            for its, (name, request) in zip(self._columns(), self.requests.items(), strict=True)
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the buffers; `bfloat16()` and the like leave them in fp32, whose range and precision scales need."""
        # NOTE: conversions ask whether a tensor is floating-point; the same bits as integers are moved only.
        super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse)
        _ = self.running, self.scaled_max  # not moved only when they are used, which may be in the capture of a graph
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Buffers that are assigned are copied: they may lie apart, in another type, or be those of another module.

        A state that has none of them, as one of plain weights, leaves them as they are: the next steps make their own.
        """
        if not any(key.startswith(prefix) for key in state_dict):
            return
        before = dict(self._buffers)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, tensor in self._buffers.items():
            if tensor is not None and tensor is not before[name]:
                values = tensor.detach()
                self.register_buffer(name, values.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
        _ = self.running, self.scaled_max


# States that have amaxes, and those that a backward pass has come by, in order, with the number of the pass whose end
# moves them. A model that is gone, after a forward pass that nothing followed, takes part in no other's step.
_recording: WeakKeyDictionary[DelayedScalingState, dist.ProcessGroup | None] = WeakKeyDictionary()
_reached: WeakKeyDictionary[DelayedScalingState, int] = WeakKeyDictionary()
_asked: set[int] = set()  # numbers of the backward passes at whose ends histories move


_ABSENT: Any = object()  # in the place of a group
_tapes = Tapes()  # of updates


@contextmanager
def step_set_aside() -> Iterator[None]:
    """A block whose passes take no part in a step that is under way: what was recorded before is there behind it."""
    before: list[tuple[WeakKeyDictionary[DelayedScalingState, Any], dict[DelayedScalingState, Any]]]
    before = [(entries, dict(entries)) for entries in (_recording, _reached)]
    for entries, _ in before:
        entries.clear()
    try:
        yield
    finally:
        for entries, kept in before:
            entries.clear()
            entries.update(kept)


def _end(number: int) -> None:
    """A backward pass ends: all states that are its own move one step on. Collective over each group of theirs."""
    _asked.discard(number)
    states = [state for state, its in list(_reached.items()) if its == number]
    by_group: dict[dist.ProcessGroup | None, list[DelayedScalingState]] = {}
    for state in states:
        del _reached[state]
        group = _recording.pop(state, _ABSENT)
        if group is not _ABSENT:
            by_group.setdefault(group, []).append(state)
    with torch.no_grad():
        for group in sorted(by_group, key=lambda group: "" if group is None else group.group_name):
            _update(by_group[group], group)


def _update(states: Sequence[DelayedScalingState], group: dist.ProcessGroup | None) -> None:
    amaxes = {state: state.running for state in states}
    if group is None:
        _warn_of_other_ranks(states)
    elif dist.get_world_size(group) > 1:
        parts, others = _of_siblings(amaxes)
        _reduce(parts, group)
        amaxes |= others
    _move_on(amaxes)


def _of_siblings(
    amaxes: dict[DelayedScalingState, Tensor],
) -> tuple[list[Tensor], dict[DelayedScalingState, Tensor]]:
    """What is reduced, in the order of [Note: What ranks reduce], and of it what siblings have that have no amaxes."""
    siblings = sorted({each.siblings for each in amaxes if each.siblings is not None}, key=lambda each: each.number)
    alone = sorted((each for each in amaxes if each.siblings is None), key=lambda each: each.number)
    places = [(each.at(place), size) for each in siblings for place, size in enumerate(each.sizes) if size]
    missing = [size for state, size in places if state not in amaxes]
    zeros = iter(next(iter(amaxes.values())).new_zeros(sum(missing)).split(missing) if missing else ())
    parts, others = [], {}
    for state, _ in places:
        parts.append(amaxes[state] if state in amaxes else next(zeros))
        if state is not None and state not in amaxes and not state.scale.is_meta:
            others[state] = parts[-1]
    return [*parts, *(amaxes[each] for each in alone)], others


def _warn_of_other_ranks(states: Iterable[DelayedScalingState]) -> None:
    """Where each rank has scales of its own and nobody has said that it shall: a checkpoint holds those of one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    # A rehearsal on the meta device has scales of nothing.
    if any(state.reduces_amax and not state.scale.is_meta for state in states):
        warnings.warn(
            f"DelayedScaling without an amax_reduction_group on {dist.get_world_size()} ranks: each has scales of its "
            "own, and a checkpoint will hold those of one. Pass autocast the group of the ranks that train one model "
            "(amax_reduction_group=torch.distributed.group.WORLD; in a pipeline the ranks of one stage); "
            "DelayedScaling(reduce_amax=False) says that this is meant",
            stacklevel=2,
        )


def _reduce(amaxes: list[Tensor], group: dist.ProcessGroup) -> None:
    together = torch.cat(amaxes)
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    traffic.report(lambda: [(None, together.nbytes)])
    _torch_private.copy_each(amaxes, together.split([a.numel() for a in amaxes]))


def _move_on(amaxes: Mapping[DelayedScalingState, Tensor]) -> None:
    """One update of all histories that are alike, in length, algorithm and device, by the amaxes of each."""
    alike: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    for state, running in amaxes.items():
        history = state.amax_history
        kept = history, running, state.scale, state.scaled_max
        alike.setdefault((state.algo, history.shape[0], history.device), []).append(kept)
    for (algo, *_), modules in alike.items():
        _advance(modules, algo)


def _advance(modules: Iterable[tuple[Tensor, ...]], algo: Literal["max", "most_recent"]) -> None:
    """`modules`: of each its history, amaxes of the running step, scales, and what largest magnitudes are scaled to."""
    histories, running, scales, maxima = zip(*modules, strict=True)

    def moved() -> Result:
        ops.advance_histories(histories, running=running, scales=scales, scaled_max=maxima, algo=algo)
        return (), None

    _tapes.run((algo, len(histories)), (*histories, *running, *scales, *maxima), moved)
