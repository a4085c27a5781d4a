"""Adam with state in fewer bytes, simulated: the bytes of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist.kernels.multi_adam import AdamLaunches, Piece
from te_dist.ops.multi_adam import AdamSignals, Adapted, MultiAdam
from te_dist.testing import assert_bitwise
from tests.ops.adam_compact import BF16, BYTES, F16, F32, Kind, made, random, tensors, twin
from tests.ops.test_adam_compact import ADDED, DECOUPLED

# Wide accesses and rows of whole blocks; a ragged block; rows of a part of the whole, whose quads begin anywhere.
PLACES = [((3, 384), (5, 2, 384, 384, 384)), ((5, 301), (5, 2, 2, 301, 301)), ((4, 192), (5, 2, 70, 192, 500))]

# Every way to keep a value and a moment, by gradients of every type.
CHOSEN = (
    Kind(first=BYTES, second=BYTES, copy=BF16),
    Kind(BF16, BF16, BYTES, keep="stochastic", grad=F32),
    Kind(BF16, BYTES, BF16, keep="remainder", grad=F16),
)


def simulate(each: list[Adapted], grads: list[Tensor], signals: AdamSignals) -> None:
    pieces = [[Piece(*one.tensors, None, one.place)] for one in each]
    noop = torch.zeros(1, dtype=torch.int32)
    launches = AdamLaunches([pieces[:1], pieces[1:]], grads, noop)
    rules = [tuple(map(float, vars(rule).values())) for rule in (DECOUPLED, ADDED)]
    launches.run(grads, rules, [signals, signals])


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "x".join(map(str, place[0])))
@pytest.mark.parametrize("kind", CHOSEN, ids=str)
def test_bytes_are_those_of_the_cpu(kind: Kind, place, on_host) -> None:
    """Two tensors in two groups, one launch for both."""
    signals = AdamSignals(grad_scale=torch.tensor(3.0))
    got = [made(kind, *place), made(kind, (2, 128), (5, 3, 0, 128, 128))]
    want = [twin(each) for each in got]
    for turn in range(2):
        grads = [random(each.value.shape, turn + i, kind.grad) for i, each in enumerate(got)]
        simulate(got, grads, signals)
        multi = MultiAdam([[want[0]], [want[1]]], grads, noop=torch.zeros(1, dtype=torch.int32))
        multi.run(grads, [DECOUPLED, ADDED], [signals, signals])
        for index, (own, other) in enumerate(zip(got, want, strict=True)):
            for (name, tensor), (_, expected) in zip(tensors(own), tensors(other), strict=True):
                assert_bitwise(tensor, expected, f"{name} of {index} after step {turn}")
