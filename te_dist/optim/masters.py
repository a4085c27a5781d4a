"""Masters of parameters: how they begin, how they follow, and how they are written into parameters.

A master is an fp32 tensor of the shape of each rank's shard, a DTensor where the parameter is one. Quantized shards end
as the bytes of the whole matrix of masters quantized at once.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist._torch_private import copy_each, sharded_like
from te_dist.formats import Partition
from te_dist.ops.multi_tensor import Batch
from te_dist.scaling.agreement import Part, PartsQuantization, parts_of
from te_dist.tensor import QuantizedStorage, QuantizedTensor, placement, writes
from te_dist.tensor.parts import before_writing
from te_dist.tensor.placement import local_tensor

MASTER = "master_param"  # its key in the state of an optimizer
_ROUNDING_OF_16_BITS = 2.0**-8  # of a value: bf16, to nearest and back
# Of weights whose master is gone: where a new one lies that was made of their codes.
_rounded: weakref.WeakKeyDictionary[QuantizedStorage, int] = weakref.WeakKeyDictionary()


def is_quantized(param: Tensor) -> bool:
    """Whether a parameter, or this rank's shard of it, is quantized."""
    return isinstance(local_tensor(param), QuantizedTensor)


def shaped_like(param: Tensor, local: Tensor, *, shape: torch.Size | None = None) -> Tensor:
    """`local` as a tensor that is sharded as `param` is; `shape`: of the whole, where it is another."""
    if not isinstance(param, DTensor):
        return local
    return sharded_like(param, local, shape=shape)


def initial_master(param: Tensor) -> Tensor:
    """fp32 (local shape), the best values known: those last written in high precision, those kept at initialization,
    those of the master by which another optimizer wrote last, or decoded ones."""
    local, known = local_tensor(param), _known_values(param)
    if known is not None:
        return known.to(local.device, torch.float32, copy=True).view(local.shape)
    decoded = local.decoded(torch.float32)
    if local.storage.follows_master:
        _rounded[local.storage] = decoded.data_ptr()
    return decoded


def _known_values(param: Tensor) -> Tensor | None:
    """Those of a plain parameter; of a quantized one those in high precision, if there are any."""
    local = local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        return local.detach()
    found = (local.storage.unsettled, local.storage.initial, _latest_master(param))
    return next((values for values in found if values is not None), None)


class _Known(NamedTuple):
    """The master of a quantized parameter, what that kept of its initial values when the master was made of it, and the
    write with its values then.

    Attributes:
        is_rounded: whether it began as the codes of a master that is gone.
        is_used: whether a step has begun with it, which writes it back unless its lr is 0.
    """

    master: Tensor
    kept: Tensor | None
    write: int
    is_rounded: bool = False
    is_used: bool = False


class Ledger:
    """Of one optimizer: by which write into a parameter each of its masters has the values of that.

    Several optimizers may take turns at a parameter. A master falls behind when another one is written, and takes the
    values of that over. Copies, and what is pickled, know what the original knew: writes into quantized parameters have
    numbers that they keep when they are copied. Writes into plain ones are counted by torch; what it does not count
    (`.data`, collectives into local tensors) is not seen.
    """

    def __init__(self) -> None:
        self._known: dict[Tensor, _Known] = {}  # of quantized parameters
        self._counted: dict[Tensor, tuple[int, int]] = {}  # of plain parameters
        self._has_warned = self._has_warned_of_codes = False
        _LEDGERS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        writes_of = {param: self._write_of(param) for param in self._known}
        return self.__dict__ | {"_counted": {}, "_writes": writes_of}  # torch counts anew in copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        writes_of = state.pop("_writes")
        self.__dict__.update(state)
        for param, (master, *_) in self._known.items():
            writes.note_write(local_tensor(master), writes_of[param])
            if 0 != writes_of[param] == local_tensor(param).storage.mastered:
                self.begin(param, master)
        _LEDGERS.add(self)

    def begin(self, param: Tensor, master: Tensor) -> None:
        """Notes a master that was made of what its parameter holds now."""
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            place = _rounded.pop(local.storage, None)
            is_rounded = place is not None and place == local_tensor(master).data_ptr()
            self._known[param] = _Known(master, local.storage.initial, int(local.storage.mastered), is_rounded)
            writes.note_master(local.storage, local_tensor(master))
        else:
            self._counted[param] = param._version, local._version

    def take_over(self, param: Tensor, master: Tensor) -> None:
        """Notes that the values a parameter has now are those of this master."""
        local, known = local_tensor(param), self._known.get(param)
        if known is not None and known.is_used and known.master is master:
            self._warn_of_codes(param)
        if isinstance(local, QuantizedTensor):
            local.storage.note_master()
        self.begin(param, master)

    def propose(self, param: Tensor, master: Tensor) -> None:
        """Notes a master that was loaded, whatever its parameter holds: see [Note: Masters that are loaded] of
        te_dist.tensor.writes."""
        local, known = local_tensor(param), self._known.get(param)
        self.forget(param)
        if not isinstance(local, QuantizedTensor):
            return
        latest = writes.master_of(local.storage)
        if latest is None or (known is not None and latest is local_tensor(known.master)):
            writes.propose(local.storage, local_tensor(master))

    def exchange(self, param: Tensor, master: Tensor, other: Tensor) -> None:
        """Notes that a master has become another tensor, with its values."""
        local, known = local_tensor(param), self._known.get(param)
        if isinstance(local, QuantizedTensor):
            writes.exchange(local.storage, local_tensor(master), local_tensor(other))
        if known is not None and known.master is master:
            self._known[param] = known._replace(master=other)

    def changed_in_place(self, param: Tensor, master: Tensor) -> Tensor | None:
        """Where `master` has been put into the place of the one that is known: that, if an op has changed its values,
        and those of the parameter, since they were noted."""
        known = self._known.get(param)
        if known is None or known.master is master:
            return None
        is_newer = self._write_of(param) == local_tensor(param).storage.mastered != known.write
        return known.master if is_newer else None

    def follow(self, param: Tensor, master: Tensor, *, was_loaded: bool = False) -> None:
        """Has the master of a parameter take what else was written into that: loaded, clamped, updated by another
        optimizer.

        Args:
            was_loaded: whether the master was loaded since the last step. It stays then if the parameter holds its
                values, rounded, whatever was loaded first.
        """
        if not self._is_in_step(param, master, was_loaded=was_loaded):
            current = self.current(param, master, was_loaded=was_loaded)
            if current is not master:
                if is_quantized(param) and self.changed_in_place(param, master) is None:
                    self._warn_of_rounding(param, master, local_tensor(current))
                local_tensor(master).copy_(local_tensor(current))
            self.take_over(param, master)
        elif (known := self._known.get(param)) is not None and known.is_rounded:
            self._known[param] = known._replace(is_used=True)

    def _warn_of_codes(self, param: Tensor) -> None:
        """Once, where a step was made from a master that began as codes, of a weight whose own is gone."""
        if not self._has_warned_of_codes:
            self._has_warned_of_codes = True
            warnings.warn(
                f"a quantized weight of shape {tuple(param.shape)} had a master, which is gone, as its optimizer is, "
                "and the one of this optimizer begins with values that are rounded: what steps added up to within the "
                "distance of two codes is lost. Keep one optimizer for all phases, load the state_dict() of the one "
                "before into the new one, or keep that one until the first step of the new one is made, which takes "
                "its masters over. Nothing is wrong where training is to begin with rounded values",
                stacklevel=_level_of_caller(),
            )

    def _warn_of_rounding(self, param: Tensor, master: Tensor, written: Tensor) -> None:
        """Once, where a master that was in step is to take values that are nearly its own: what it knew beyond codes is
        lost, and with a copy like this after every step, whatever steps add up to."""
        was_in_step = self._write_of(param) != 0
        is_copy = local_tensor(param).storage.mastered != 0  # of what another master was quantized to
        captured = written.is_cuda and torch.cuda.is_current_stream_capturing()
        if not was_in_step or is_copy or captured or self._has_warned:
            return
        if writes.are_near(written, local_tensor(master)):
            self._has_warned = True
            warnings.warn(
                f"a quantized weight of shape {tuple(param.shape)} was given values between steps that are nearly its "
                "own, as a plain copy of itself is, and its master begins anew from values that are rounded: steps "
                "smaller than the distance of two codes are lost each time. Keep what is to be swapped back as "
                "param.detach().clone(), and change weights in place (clamp_, mul_). DistributedDataParallel gives "
                "such values when it wraps a model: wrap it before the optimizer is made and a checkpoint is loaded. "
                "Nothing is wrong where values were loaded on purpose",
                stacklevel=_level_of_caller(),
            )

    def current(self, param: Tensor, master: Tensor, *, was_loaded: bool = False) -> Tensor:
        """What `follow` would make of a master, or that itself where it would stay: nothing is changed."""
        if (changed := self.changed_in_place(param, master)) is not None:
            return changed
        if self._is_in_step(param, master, was_loaded=was_loaded):
            return master
        if not is_quantized(param):
            return shaped_like(param, _where_written(local_tensor(param), local_tensor(master), was_loaded=was_loaded))
        written = initial_master(param).to(local_tensor(master).device, master.dtype)
        if was_loaded and writes.are_near(written, local_tensor(master)):
            return master
        return shaped_like(param, written)

    def _is_in_step(self, param: Tensor, master: Tensor, *, was_loaded: bool) -> bool:
        """Whether a master has, as far as is known, the values of its parameter."""
        local = local_tensor(param)
        if not isinstance(local, QuantizedTensor):
            return not was_loaded and self._counted.get(param) == (param._version, local._version)
        write = local.storage.mastered
        if param not in self._known:
            return local.storage.follows_master and not was_loaded
        if write == 0:  # as long as a weight has had no gradient, it keeps what its master was made of
            kept = local.storage.initial
            return kept is not None and kept is self._known[param].kept and not was_loaded
        return write == self._write_of(param) and self.changed_in_place(param, master) is None

    def forget(self, param: Tensor) -> None:
        """Of a parameter that the optimizer no longer has, or whose master was loaded."""
        self._known.pop(param, None)
        self._counted.pop(param, None)

    def keep(self, params: Iterable[Tensor]) -> None:
        """Of these parameters only: others are the optimizer's no longer."""
        for stale in (self._known.keys() | self._counted.keys()) - set(params):
            self.forget(stale)

    def master_of(self, param: Tensor, write: int) -> Tensor | None:
        """The master whose values this write had, if it still has them."""
        return self._known[param].master if write == self._write_of(param) != 0 else None

    def _write_of(self, param: Tensor) -> int:
        """The write with the values of the master of a quantized parameter; 0 where there is none."""
        known = self._known.get(param)
        return 0 if known is None else writes.write_of(local_tensor(known.master))


_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _latest_master(param: Tensor) -> Tensor | None:
    """This rank's part of the master whose values a quantized parameter has, or had when a copy of it was made, if its
    optimizer is still there."""
    storage = local_tensor(param).storage
    if (write := storage.mastered) == 0:
        return None
    if (latest := writes.master_of(storage)) is not None:
        return latest
    found = (ledger.master_of(param, write) for ledger in list(_LEDGERS))
    return next((local_tensor(master) for master in found if master is not None), writes.former_values(storage))


def _level_of_caller() -> int:
    """For a warning: where a step was called, past te_dist's optimizers and torch's wrappers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("te_dist.optim", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def _where_written(values: Tensor, master: Tensor, *, was_loaded: bool) -> Tensor:
    """A master with the values of its plain parameter, where these are others than its own as that rounds them.

    One that was loaded keeps its own if all of them are as near as rounding to any 16 bits leaves them: the type may be
    another than it was saved with.
    """
    values = values.to(master.device)
    wide = values.to(master.dtype)
    is_own = master.to(values.dtype) == values
    if was_loaded:
        is_own |= ((wide - master).abs() <= _ROUNDING_OF_16_BITS * master.abs()).all()
    return torch.where(is_own, master, wide)


def left_alone(group: Mapping[str, Any]) -> set[Tensor]:
    """Quantized parameters of a group that a step does not move, since its lr is 0, as far as the host knows.

    They keep their bytes: decoded values, with which masters begin, have other ones in most formats. torch's helpers
    make missing state by such a step, before they save or load it. What ranks have yet to agree on is written.
    """
    lr = group.get("lr")
    if isinstance(lr, Tensor) and lr.device.type != "cpu" or lr != 0:
        return set()
    quantized = (param for param in group["params"] if is_quantized(param))
    return {param for param in quantized if local_tensor(param).storage.unsettled is None}


def gradient(param: Tensor) -> Tensor | None:
    """The gradient as its parameter is sharded. Collective where ranks have yet to sum it (sequence parallelism)."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        return grad.redistribute(placements=param.placements)
    return grad


def warn_of_no_gradients(optimizer: torch.optim.Optimizer) -> None:
    """At a step at which no parameter has a gradient, where there was none before: mostly it has those of nobody."""
    if not optimizer.state:
        warnings.warn(
            f"{type(optimizer).__name__}.step: no parameter has a gradient, at the first step. fully_shard puts others "
            "in the place of a module's parameters: make the optimizer after it",
            stacklevel=_level_of_caller(),
        )


def spread_over(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over which the parts of a matrix are spread."""
    return placement.groups(param) if isinstance(param, DTensor) else ()


def partition(param: Tensor) -> Partition | None:
    """How the matrix of a parameter is cut; None where it is not."""
    return placement.partition(param) if isinstance(param, DTensor) else None


class Held(NamedTuple):
    """A parameter and all that a step writes for it, as they are at one moment.

    Attributes:
        state: tensors by name, among them the master where there is one.
        storage, buffers: of a quantized parameter; buffers of a plain one are itself.
    """

    param: Tensor
    local: Tensor
    state: Mapping[str, Tensor]
    storage: QuantizedStorage | None
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(param: Tensor, state: Mapping[str, Tensor]) -> Held:
        """Everything as it is now."""
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            return Held(param, local, state, local.storage, local.storage.buffers)
        return Held(param, local, state, None, {"": local})

    def tensors(self) -> list[tuple[Mapping[str, Tensor], str, Tensor]]:
        """Every tensor, and how it is reached."""
        return [(found, name, tensor) for found in (self.state, self.buffers) for name, tensor in found.items()]

    def is_held(self) -> bool:
        """Whether the parameter still holds this."""
        if local_tensor(self.param) is not self.local:
            return False
        return self.storage is None or (self.local.storage is self.storage and self.storage.buffers is self.buffers)

    def parts(self, values: Tensor) -> list[Part]:
        """What is quantized from what, of a quantized parameter."""
        assert self.storage is not None
        return parts_of(self.storage, values, partition(self.param))


class Places:
    """Whether tensors stay where they were, and as large: what was prepared for them holds as long as they do."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._tensors = [found for each in held for found in each.tensors()]
        self._locals = [local_tensor(tensor) for _, _, tensor in self._tensors]
        self._before = self._extents()

    def hold(self) -> bool:
        """Whether every tensor is still there, and lies where it lay."""
        return (
            all(each.is_held() for each in self._held)
            and all(found.get(name) is tensor for found, name, tensor in self._tensors)
            and self._extents() == self._before
        )

    def _extents(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.numel()) for tensor in self._locals]


def by_groups(held: Iterable[Held]) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
    """Indices of the quantized ones, by the process groups that agree on their scales."""
    found: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, each in enumerate(held):
        if each.storage is not None:
            found.setdefault(spread_over(each.param), []).append(index)
    return found


class WriteBack:
    """Writes masters into parameters of one device, as often as one likes: one reduction for each process group.

    Args:
        held: parameters whose states have masters.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._places = Places(held)
        self._held = held
        masters = [local_tensor(each.state[MASTER]) for each in held]
        plain = [(each.local, master) for each, master in zip(held, masters, strict=True) if each.storage is None]
        self._targets, self._sources = zip(*plain, strict=True) if plain else ((), ())
        noop = torch.zeros(1, dtype=torch.int32, device=masters[0].device)
        self._quantizations = []
        for groups, own in by_groups(held).items():
            parts = [part for index in own for part in held[index].parts(masters[index])]
            quantization = PartsQuantization(parts, groups, noop=noop)
            readers = Batch([[reader] for reader in quantization.readers if reader is not None], noop)
            self._quantizations.append((quantization, readers))

    def holds(self) -> bool:
        """Whether it can run once more."""
        return self._places.hold()

    def run(self, ledger: Ledger) -> None:
        """Collective where shards share scales. `ledger`: where it is noted."""
        for each in self._held:
            if each.storage is not None:
                before_writing(each.storage)
        if self._targets:
            copy_each([target.detach() for target in self._targets], self._sources)
        for quantization, readers in self._quantizations:
            quantization.begin()
            readers.run()
            quantization.finish()
        for each in self._held:
            if each.storage is not None:
                each.storage.unsettled = None
            ledger.take_over(each.param, each.state[MASTER])
