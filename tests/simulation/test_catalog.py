"""One call of every op, simulated: the bytes of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from te_dist.testing import assert_bitwise
from tests.gpu.catalog import Call, calls

MOST = 150_000  # elements of a tensor
FEWER = {"tile_amax": 40_000}  # where threads of the host wait for each other all the time


def one_of_each() -> list[Call]:
    """The first with something to do, and not too much, of those whose bytes are defined."""
    found: dict[str, Call] = {}
    for call in calls():
        values = [value for value in (*call.inputs.values(), *call.outputs.values()) if isinstance(value, Tensor)]
        if call.is_exact and all(0 < v.numel() <= FEWER.get(call.op.__name__, MOST) for v in values):
            found.setdefault(call.op.__name__, call)
    return list(found.values())


def blank(call: Call) -> Call:
    """The same with outputs of its own."""
    return replace(call, outputs={name: value.clone() for name, value in call.outputs.items()})


@pytest.mark.parametrize("call", one_of_each(), ids=lambda call: call.op.__name__)
def test_bytes_are_those_of_the_cpu(call, request):
    want = blank(call)
    want.run()
    request.getfixturevalue("simulated")
    got = blank(call)
    got.run()
    for name, output in got.outputs.items():
        assert_bitwise(output, want.outputs[name], f"{name} of {call.name}")
