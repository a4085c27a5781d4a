"""Adam that quantizes what it updates, simulated: the bytes of the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.multi_adam import AdamLaunches, Piece
from te_dist.ops.multi_adam import AdamSignals, Adapted, MultiAdam
from te_dist.ops.multi_tensor import record
from te_dist.testing import assert_bitwise
from tests.ops.test_adam_compact import DECOUPLED

SHAPES = [(96, 160), (272, 144), (64, 512)]  # ragged tiles; whole ones of both
BLOCK = dict(fp8="e4m3", pow2=False, eps=0.0, row_tile=(128, 128), col_tile=(128, 128))
RUNS = dict(fp8="e4m3", row_tile=(1, 32), col_tile=(32, 1))
SQUARES = dict(fp8="e4m3", row_tile=(32, 32), col_tile=(32, 32))
QUANTIZERS = {
    "block": (ops.quantize_float8_block, 128, torch.float32, BLOCK),
    "mxfp8 by runs": (ops.quantize_mxfp8, 32, torch.uint8, RUNS),
    "mxfp8 by squares": (ops.quantize_mxfp8, 32, torch.uint8, SQUARES),
}


def outputs(shape: tuple[int, int], length: int, dtype: torch.dtype, rule: dict) -> dict[str, Tensor]:
    """Poisoned data and scales of both directions."""
    rows, cols = shape
    found = {}
    for side in ("row", "col"):
        tile = rule[f"{side}_tile"] if length == 128 else (1, length) if side == "row" else (length, 1)
        grid = (-(-rows // tile[0]), -(-cols // tile[1]))
        extents = (cols, rows) if side == "col" and length == 128 else shape
        found[f"{side}_data"] = torch.full(extents, 0x55, dtype=torch.uint8)
        found[f"{side}_scale"] = torch.full(grid, 0x55, dtype=torch.uint8).to(dtype)
    return found


def adapted(shape: tuple[int, int], name: str) -> tuple[Adapted, dict[str, Tensor]]:
    """A tensor with what reads it, and all that a step writes."""
    op, length, dtype, rule = QUANTIZERS[name]
    values = torch.randn(3, *shape, generator=torch.Generator().manual_seed(shape[0]))
    value, exp_avg, exp_avg_sq = values[0], values[1] * 0.1, values[2].square() * 0.01
    planes = outputs(shape, length, dtype, rule)
    calls = record(partial(op, value, phase=(0, 0), **rule, **planes))
    assert calls is not None
    state = dict(value=value, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=torch.zeros(1))
    return Adapted(**state, readers=tuple(calls)), state | planes


@pytest.mark.every_run(name=("block", "mxfp8 by runs"))
@pytest.mark.parametrize("name", QUANTIZERS)
def test_codes_are_those_of_the_cpu(name: str, request: pytest.FixtureRequest) -> None:
    """Several tensors, one launch for those that are accessed alike."""
    got, want = ([adapted(shape, name) for shape in SHAPES] for _ in range(2))
    grads = [torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16() for shape in SHAPES]
    noop, signals = torch.zeros(1, dtype=torch.int32), AdamSignals()
    MultiAdam([[each for each, _ in want]], grads, noop=noop).run(grads, [DECOUPLED], [signals])
    request.getfixturevalue("on_host")
    pieces = [[Piece(*each.tensors, each.readers[0].task())] for each, _ in got]
    AdamLaunches([pieces], grads, noop).run(grads, [tuple(map(float, vars(DECOUPLED).values()))], [signals])
    for (_, written), (_, expected), shape in zip(got, want, SHAPES, strict=True):
        for field, tensor in written.items():
            assert_bitwise(tensor, expected[field], f"{field} of {shape}")
