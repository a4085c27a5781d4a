"""Adam over many tensors at once, and what is done with the updated values meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import _C
from te_dist.kernels.multi_adam import AdamLaunches, Piece
from te_dist.ops.multi_tensor import Batch, Call


@dataclass(frozen=True)
class AdamRule:
    """What a group of tensors is updated by.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as in `torch.optim.AdamW`.
        decoupled: the decay is taken from the value; False adds it to the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


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
    of several matrices that lie one behind the other in the value one call for each, or none.
    """

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    copy: Tensor | None = None
    readers: tuple[Call, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
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
        if noop.is_cuda:
            self._launches = AdamLaunches([[_pieces(each) for each in group] for group in groups], grads, noop)
        else:
            self._readers = Batch([[reader] for group in groups for each in group for reader in each.readers], noop)
            self._flat = [[[_flat(t) for t in each.tensors] for each in group] for group in groups]

    def run(self, grads: Sequence[Tensor], rules: Sequence[AdamRule], signals: Sequence[AdamSignals]) -> None:
        """Counts the steps, updates, and runs the readers. `rules`, `signals`: of each group."""
        if self._noop.is_cuda:
            self._launches.run(grads, [tuple(map(float, astuple(rule))) for rule in rules], signals)
            return
        left_out = any(s.found_inf is not None and s.found_inf.item() for s in signals)
        self._noop.fill_(left_out)
        if left_out:
            return
        remaining = iter(grads)
        for group, rule, own in zip(self._flat, rules, signals, strict=True):
            lr = rule.lr if own.lr is None else own.lr.item()
            scale = 1.0 if own.grad_scale is None else own.grad_scale.item()
            arguments = [(*each[:3], _flat(next(remaining)), *each[3:]) for each in group]
            _C.multi_adam(arguments, (lr, *astuple(rule)[1:]), scale, torch.get_num_threads())
        self._readers.run()


def _with_copy(each: Adapted) -> Adapted:
    """A reader that only copies is no reader."""
    if len(each.readers) != 1 or each.readers[0].name != "copy_":
        return each
    target, _ = each.readers[0].arguments
    return replace(each, copy=target, readers=())


def _pieces(each: Adapted) -> list[Piece]:
    """What each reader reads, and what belongs to it; all of the tensor where there are not several."""
    if len(each.readers) < 2:
        return [_piece(each)]
    sizes = [reader.arguments[reader.name == "copy_"].numel() for reader in each.readers]
    parts = [tensor.view(-1).split(sizes) for tensor in (each.value, each.exp_avg, each.exp_avg_sq)]
    return [
        _piece(_with_copy(Adapted(*tensors, each.step, readers=(reader,))))
        for *tensors, reader in zip(*parts, each.readers, strict=True)
    ]


def _piece(each: Adapted) -> Piece:
    return Piece(*each.tensors, each.readers[0].task() if each.readers else None)


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().view(-1)
