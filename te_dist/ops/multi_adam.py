"""Adam over many tensors at once, and what is done with the updated values meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import _C
from te_dist.kernels.multi_adam import AdamLaunches, CompactPlace, Piece
from te_dist.ops.multi_tensor import Batch, Call

_FLAT = (-1,)
MOMENT_CODES = (torch.uint8, torch.float8_e4m3fn)  # names of moments in bytes, which are kept as the first


@dataclass(frozen=True)
class AdamRule:
    """What a group of tensors is updated by.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as in `torch.optim.AdamW`.
        decoupled: the decay is taken from the value; False adds it to the gradient.
        corrected: moments are corrected for their bias toward 0.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    corrected: bool = True


class AdamSignals(NamedTuple):
    """Values that are known on the device, f32, one element each; None where they are not asked for.

    lr replaces that of the rule. Gradients are divided by grad_scale. Where found_inf is not 0 the step is left out.
    """

    lr: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class Adapted:
    """One tensor that Adam updates. All are contiguous and have the same number of elements, but for the step.

    value: fp32, bf16 or fp16.  exp_avg, exp_avg_sq: f32, the moments.  step: f32, one element, steps done so far.
    copy: fp32, bf16 or fp16, takes the updated value too.  readers: calls that read the updated value, an fp32 matrix;
    of several matrices that lie one behind the other in the value one call for each, or none.  place: of what has
    other than fp32 moments (bf16, or bytes with scales), or a value that is not rounded to nearest.
    """

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    copy: Tensor | None = None
    readers: tuple[Call, ...] = ()
    place: CompactPlace | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Value, exp_avg, exp_avg_sq, step, copy."""
        return self.value, self.exp_avg, self.exp_avg_sq, self.step, self.copy


class MultiAdam:
    """One step of Adam: on the GPU one launch for the steps of each group, and one or two for each kind of tensor.

    Tensors are those of the moment: whoever replaces one makes this anew. Gradients may be others at every step.

    Args:
        groups: tensors by group.
        grads: of all tensors, group by group; fp32, bf16 or fp16, contiguous.
        noop: int32 (1,), is set where a step is left out, and cleared where it is not.
    """

    def __init__(self, groups: Sequence[Sequence[Adapted]], grads: Sequence[Tensor], *, noop: Tensor) -> None:
        self._noop = noop
        groups = [[_with_copy(each) for each in group] for group in groups]
        tensors = [each for group in groups for each in group]
        self._prepared = [] if noop.is_cuda else [[_prepared(each) for each in group] for group in groups]
        if noop.is_cuda:
            self._launches = AdamLaunches([[_pieces(each) for each in group] for group in groups], grads, noop)
            tensors = [each for each in tensors if each.place is not None]
        self._readers = Batch([[reader] for each in tensors for reader in each.readers], noop)

    def run(self, grads: Sequence[Tensor], rules: Sequence[AdamRule], signals: Sequence[AdamSignals]) -> None:
        """Counts the steps, updates, and runs the readers. `rules`, `signals`: of each group."""
        if self._noop.is_cuda:
            self._launches.run(grads, [tuple(map(float, astuple(rule))) for rule in rules], signals)
            self._readers.run()
            return
        left_out = any(s.found_inf is not None and s.found_inf.item() for s in signals)
        self._noop.fill_(left_out)
        if left_out:
            return
        remaining = iter(grads)
        threads = torch.get_num_threads()
        for group, rule, own in zip(self._prepared, rules, signals, strict=True):
            lr = rule.lr if own.lr is None else own.lr.item()
            scale = 1.0 if own.grad_scale is None else own.grad_scale.item()
            numbers = (lr, *astuple(rule)[1:])
            arguments = {True: [], False: []}
            for (before, shape, after), grad in zip(group, islice(remaining, len(group)), strict=True):
                arguments[shape == _FLAT].append((*before, grad.detach().view(shape), *after))
            _C.multi_adam(arguments[True], numbers, scale, threads)
            _C.multi_adam_compact(arguments[False], numbers, scale, threads)
        self._readers.run()


def _with_copy(each: Adapted) -> Adapted:
    """A reader that only copies is no reader: the value that it copies is the updated one."""
    is_rounded = each.place is not None and each.place.by_chance
    if len(each.readers) != 1 or each.readers[0].name != "copy_" or is_rounded:
        return each
    target, _ = each.readers[0].arguments
    return replace(each, copy=target, readers=())


def _prepared(each: Adapted) -> tuple[Sequence[Any], tuple[int, ...], Sequence[Any]]:
    """For the CPU: arguments before the gradient, its shape, and those behind it."""
    place = each.place
    shape = _FLAT if place is None else place.shape
    value, exp_avg, exp_avg_sq, copy = (
        None if t is None else t.detach().view(shape) for t in (*each.tensors[:3], each.copy)
    )
    after = (each.step.detach().view(-1), copy)
    if place is not None:
        kept = (place.exp_avg_scale, place.exp_avg_sq_scale, place.remainder)
        after += (*(None if t is None else t.detach().view(-1) for t in kept), place.noise, place.by_chance)
    return (value, exp_avg, exp_avg_sq), shape, after


def _pieces(each: Adapted) -> list[Piece]:
    """What each reader reads, and what belongs to it; all of the tensor where there are not several."""
    if each.place is not None:
        return [Piece(*each.tensors, None, each.place)]
    if len(each.readers) < 2:
        return [_piece(each)]
    sizes = [reader.arguments[reader.name == "copy_"].numel() for reader in each.readers]
    values, means, squares = (tensor.view(-1).split(sizes) for tensor in (each.value, each.exp_avg, each.exp_avg_sq))
    parts = zip(values, means, squares, each.readers, strict=True)
    return [
        _piece(_with_copy(Adapted(value, mean, square, each.step, readers=(reader,))))
        for value, mean, square, reader in parts
    ]


def _piece(each: Adapted) -> Piece:
    return Piece(*each.tensors, each.readers[0].task() if each.readers else None)
