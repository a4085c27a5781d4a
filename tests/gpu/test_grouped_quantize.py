"""Quantizers of groups of rows on the GPU against those on the CPU, byte by byte, what must not be written included."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from te_dist import ops
from te_dist.kernels.panels import tiles_at_most
from tests.codecs.kernel_inputs import DTYPES, KINDS, matrix
from tests.gpu.twins import check_twins, shifted
from tests.ops.grouped_quantize import CODECS, ROUTINGS, STOCHASTIC, GroupCodec, routed
from tests.ops.sources import cases, sums_of, with_sums

pytestmark = pytest.mark.gpu

MANY = {"thousand": [3, 0, 70, 1] * 300, "skewed": [1, 3000, 2, 0, 640]}
PLACES = [(512, 0), (200, 0), (131, 1), (1, 0), (258, 1)]  # columns, elements in front of every matrix
# The first codec of every op that writes both directions.
BOTH_SIDES = {codec.op: codec for codec in reversed(CODECS) if {"row_data", "col_data"} <= codec.parts.keys()}


@pytest.mark.parametrize("codec", CODECS + STOCHASTIC, ids=lambda codec: codec.name)
def test_bytes_of_the_cpu(codec: GroupCodec):
    for routing, sizes in (ROUTINGS | MANY).items():
        rows, table = routed(sizes)
        for (wanted, shift), dtype in zip(PLACES, (*DTYPES, torch.bfloat16, torch.bfloat16), strict=True):
            cols = codec.columns(wanted)
            outputs = {key: shifted(tensor, shift) for key, tensor in codec.outputs(rows, cols, len(sizes)).items()}
            x = shifted(matrix("wide", (rows, cols), dtype), shift)
            check_twins(
                codec.op, outputs, f"{routing}, {cols}, {dtype}", x=x, table=table, **codec.arguments(len(sizes))
            )


@pytest.mark.parametrize("codec", BOTH_SIDES.values(), ids=lambda codec: codec.name)
def test_sources_and_sums(codec: GroupCodec):
    for kind in KINDS:
        sizes = ROUTINGS["ragged"]
        rows, table = routed(sizes)
        for cols in (256, codec.columns(70)):
            for case in cases((rows, cols), torch.bfloat16, kind):
                outputs = codec.outputs(rows, cols, len(sizes))
                outputs |= sums_of(case.source) | {"sums": torch.empty(tiles_at_most(rows, len(sizes)), cols)}

                def of_tensors(case=case, **arguments):
                    source = case.make(**{name: arguments.pop(name) for name in case.tensors})
                    sums = {name: arguments.pop(name) for name in ("sums", "row_sums") if name in arguments}
                    codec.op(with_sums(source, **sums), **arguments)

                check_twins(
                    of_tensors,
                    outputs,
                    f"{case.name}, {cols}",
                    **case.tensors,
                    table=table,
                    **codec.arguments(len(sizes)),
                )


@pytest.mark.parametrize(
    "sizes", [*(ROUTINGS | MANY).values(), [128 * 128 * 9 + 1, 0, 40000]], ids=lambda s: str(sum(s))
)
def test_sums_of_groups(sizes):
    rows, table = routed(sizes)
    sums = matrix("normal", (tiles_at_most(rows, len(sizes)), 300), torch.float32)
    check_twins(ops.group_sums, {"out": torch.empty(len(sizes), 300)}, str(sizes[:4]), sums=sums, table=table)


# The first codec of every op that writes both directions.
BOTH_SIDES = {codec.op: codec for codec in reversed(CODECS) if {"row_data", "col_data"} <= codec.parts.keys()}


@pytest.mark.parametrize("codec", CODECS + STOCHASTIC, ids=lambda codec: codec.name)
def test_nothing_is_written_where_a_flag_is_set(codec: GroupCodec):
    rows, table = routed(ROUTINGS["ragged"])
    x, noop = matrix("normal", (rows, 256), torch.bfloat16), torch.ones(1, dtype=torch.int32)
    outputs = codec.outputs(rows, 256, len(ROUTINGS["ragged"]))
    check_twins(codec.op, outputs, codec.name, x=x, table=table, noop=noop, **codec.arguments(len(ROUTINGS["ragged"])))


@pytest.mark.parametrize("routing", ROUTINGS | MANY)
def test_amaxes(routing):
    sizes = (ROUTINGS | MANY)[routing]
    rows, table = routed(sizes)
    for (cols, shift), dtype in product(PLACES, DTYPES):
        x = shifted(matrix("wide", (rows, cols), dtype), shift)
        x[sum(sizes) :] = torch.inf
        for count in (1, len(sizes)):
            name, scale = f"{count} of {cols}, {dtype}", torch.ones(count)
            check_twins(ops.grouped_amax, {"out": torch.empty(count)}, name, x=x, table=table)
            for hadamard in (None, 0xD7E8):
                outputs = {"row_amax": torch.empty(count), "col_amax": torch.empty(count)}
                check_twins(ops.grouped_direction_amax, outputs, name, x=x, table=table, hadamard=hadamard)
            outputs = {"row_data": torch.empty((rows, cols), dtype=torch.uint8), "amax": torch.empty(count)}
            rule = dict(x=x, scale=scale, table=table, fp8="e4m3")
            check_twins(ops.grouped_quantize_float8_tensor, outputs, f"recorded, {name}", **rule)
