"""Calls of ops on groups with a table that was made for more rows than there are, and memory behind their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from te_dist.testing import assert_bitwise
from tests.gpu.catalog import Call, grouped_quantizers, groups, groups_by_decoding, groups_summed_whole
from tests.gpu.twins import whole
from tests.ops.groups import table_of

_GUARD, _POISON = 2**17, 77  # bytes behind an output, and what they are
_OPS, _ENOUGH = 17, 60  # ops on groups, calls of a family that have one of each


def foreign_calls() -> list[Call]:
    """One of every op on groups, with something to do."""
    return [_beyond(call) for call in _of_each_op()]


@cache
def _of_each_op() -> list[Call]:
    found: dict[str, Call] = {}
    for family in (groups, groups_by_decoding, grouped_quantizers, groups_summed_whole):
        for call in islice(family(), _ENOUGH):
            tensors = [value for value in (*call.inputs.values(), *call.outputs.values()) if isinstance(value, Tensor)]
            if "table" in call.inputs and all(tensor.numel() for tensor in tensors):
                found.setdefault(call.op.__name__, call)
    assert len(found) == _OPS
    return list(found.values())


def _beyond(call: Call) -> Call:
    """Groups of twice the rows, and some: the last of them reach behind all matrices."""
    sizes = [2 * size + 31 for size in call.inputs["table"][0].diff().tolist()]
    return replace(call, inputs=call.inputs | {"table": table_of(sizes, 2**20)}, outputs=dict(_guarded(call)))


def _guarded(call: Call) -> Iterator[tuple[str, Tensor]]:
    """The outputs, all equal bytes, with more of these behind."""
    for name, output in call.outputs.items():
        size = output.untyped_storage().nbytes() + _GUARD
        storage = torch.full((size,), _POISON, dtype=torch.uint8).untyped_storage()
        target = torch.empty(0, dtype=output.dtype)
        yield name, target.set_(storage, output.storage_offset(), output.shape, output.stride())


def check_foreign(got: Call, want: Call) -> None:
    """Runs a call of which the CPU has run `want`: values are alike, and nothing behind them is written."""
    got.run()
    for name, expected in want.outputs.items():
        output, what = got.outputs[name], f"{name} of {want.op.__name__}"
        for tensor in (output, expected):
            guard = whole(tensor)[-_GUARD:]
            assert torch.equal(guard, torch.full_like(guard, _POISON)), f"{what}: written behind its end"
        if want.is_exact:
            assert_bitwise(whole(output), whole(expected), what)
        else:
            largest = float(expected.abs().max())
            assert ((output.cpu() - expected).abs() <= 2**-7 * largest).all(), what
