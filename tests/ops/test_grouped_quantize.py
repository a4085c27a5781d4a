"""Quantizers of groups of rows, on CPU tensors, against the quantizers of matrices on each group alone."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.kernels.panels import tiles_at_most
from te_dist.ops.group_table import padded_rows
from te_dist.ops.panel_sums import column_sums, panel_sums
from te_dist.ops.source import Summed, sums_shape
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import matrix
from tests.ops.grouped_quantize import (
    CODECS,
    ROUTINGS,
    RUNS,
    SPARE_ROWS,
    STATE,
    STOCHASTIC,
    GroupCodec,
    block,
    check,
    poison,
    routed,
)
from tests.ops.sources import cases, sums_of, with_sums


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "cols"), [(torch.bfloat16, 272), (torch.float32, 95)])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_group_as_if_it_were_alone(codec: GroupCodec, routing, dtype, cols):
    sizes, cols = ROUTINGS[routing], codec.columns(cols)
    rows, table = routed(sizes)
    x = matrix("wide", (rows, cols), dtype)
    outputs = codec.outputs(rows, cols, len(sizes))
    poison(outputs)
    codec.op(x, table=table, **codec.arguments(len(sizes)), **outputs)
    check(outputs, codec.want(x, sizes), f"{codec.name}, {routing}, {dtype}")


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_sources_are_computed_and_summed_in_front(codec: GroupCodec):
    sizes = ROUTINGS["ragged"]
    rows, table = routed(sizes)
    for case in cases((rows, 160), torch.bfloat16, "normal"):
        x = torch.empty(rows, 160, dtype=torch.bfloat16)
        ops.evaluate(case.source, out=x)
        outputs, found = codec.outputs(rows, 160, len(sizes)), sums_of(case.source)
        sums = found["sums"] = torch.full((padded_rows(rows, len(sizes)) // 128, 160), 7.0)
        poison(outputs)
        codec.op(with_sums(case.source, **found), table=table, **codec.arguments(len(sizes)), **outputs)
        check(outputs, codec.want(x, sizes), f"{codec.name} of {case.name}")
        begin = tile = 0
        for size in sizes:
            part = x[begin : begin + size]
            want = torch.empty(sums_shape(part))
            panel_sums(part, out=want)
            assert_bitwise(sums[tile : tile + len(want)], want, f"sums of {case.name}")
            begin, tile = begin + size, tile + len(want)
        assert (sums[tile:] == 7.0).all()
        if "row_sums" in found:
            want = sums_of(case.source)["row_sums"]
            ops.evaluate(with_sums(case.source, row_sums=want), out=x)
            want[:, begin:] = 77.0
            assert_bitwise(found["row_sums"], want, f"sums of the rows of {case.name}")


@pytest.mark.parametrize(
    "sizes", [*ROUTINGS.values(), [128 * 128 * 9 + 1, 0, 40000]], ids=lambda sizes: str(sum(sizes))
)
def test_sums_of_groups_are_those_of_each_alone(sizes):
    rows, table = routed(sizes)
    x = torch.randn(rows, 12)
    panels = tiles_at_most(rows, len(sizes))
    codec, sums, out = block({"row": RUNS["row"]}), torch.full((panels, 12), 7.0), torch.full((len(sizes), 12), 7.0)
    codec.op(Summed(x, sums), table=table, **codec.rule, **codec.outputs(rows, 12, len(sizes)))
    ops.group_sums(sums, table=table, out=out)
    begin = 0
    for size, got in zip(sizes, out, strict=True):
        part = x[begin : begin + size]
        want = torch.empty(sums_shape(part))
        panel_sums(part, out=want)
        assert_bitwise(got, column_sums(want), f"group of {size}")
        assert ((got - part.double().sum(0)).abs() <= 2**-18 * part.double().abs().sum(0)).all()
        begin += size


def test_noise_is_that_of_the_whole_matrix():
    codec, sizes = STOCHASTIC[0], ROUTINGS["aligned"]
    rows, table = routed(sizes)
    x = matrix("normal", (rows - rows % 2, 272), torch.bfloat16)
    outputs = codec.outputs(*x.shape, len(sizes))
    codec.op(x, table=table, **codec.arguments(len(sizes)), **outputs)
    want = codec.make(*x.shape, x.shape[0])
    amax = torch.ones(1, 1)
    planes = want | {"col_scale": want["col_scale"].t(), "row_tensor_amax": amax, "col_tensor_amax": amax}
    ops.quantize_nvfp4(x, phase=(0, 0), **codec.rule, **planes)
    for key, dim, length in (("row_data", 0, 768), ("col_data", 1, 384), ("row_scale", 0, 768), ("col_scale", 1, 48)):
        assert_bitwise(outputs[key].narrow(dim, 0, length), want[key].narrow(dim, 0, length), key)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_amaxes_of_groups(routing):
    sizes = ROUTINGS[routing]
    rows, table = routed(sizes)
    x = matrix("wide", (rows, 70), torch.bfloat16)
    x[sum(sizes) :] = torch.inf
    each, whole, scale = torch.full((len(sizes),), 7.0), torch.full((1,), 7.0), torch.ones(len(sizes))
    ops.grouped_amax(x, table=table, out=each)
    ops.grouped_amax(x, table=table, out=whole)
    want = [
        part.float().nan_to_num(0.0, torch.inf).abs().max().item() if part.numel() else 0.0
        for part in x.split([*sizes, SPARE_ROWS])
    ]
    assert_bitwise(each, torch.tensor(want[:-1]), "amax of each")
    assert_bitwise(whole, torch.tensor([max(want[:-1])]), "amax of all")
    rows_found, transforms = torch.full((len(sizes),), 7.0), torch.full((len(sizes),), 7.0)
    ops.grouped_direction_amax(x, table=table, hadamard=0xD7E8, row_amax=rows_found, col_amax=transforms)
    assert_bitwise(rows_found, each, "amax of rows")
    for part, got in zip(x.split([*sizes, SPARE_ROWS]), transforms, strict=False):
        alone = torch.zeros(1, 1)
        padded = torch.cat((part, part.new_zeros(-part.shape[0] % 16, part.shape[1])))
        ops.direction_amax(padded, hadamard=0xD7E8, col_amax=alone)
        assert_bitwise(got, alone[0, 0], "amax of the transform")
    recorded = torch.full((len(sizes),), 2.0)
    row_data = torch.empty(rows, 70, dtype=torch.uint8)
    ops.grouped_quantize_float8_tensor(x, scale, table=table, fp8="e4m3", amax=recorded, row_data=row_data)
    assert_bitwise(recorded, torch.tensor(want[:-1]).clamp(min=2.0), "recorded amax")


def test_groups_need_so_many_tiles_at_most():
    most = [[-(-rows // 128) for rows in range(400)]]
    for _ in range(4):
        most.append([max(most[-1][rows - last] + most[0][last] for last in range(rows + 1)) for rows in range(400)])
    for groups, by_rows in enumerate(most, 1):
        assert [tiles_at_most(rows, groups) for rows in range(400)] == by_rows


ROWS, TABLE = routed([100, 20])
X = torch.zeros(ROWS, 256)
GOOD = block(RUNS).rule | block(RUNS).outputs(ROWS, 256, 2) | {"x": X, "table": TABLE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": TABLE[:3]}, "table: got shape"),
        ({"table": TABLE.long()}, "table: got torch.int64"),
        ({"row_tile": (128, 1)}, "row_tile: got"),
        ({"row_data": torch.zeros(ROWS, 255, dtype=torch.uint8)}, "row_data: got shape"),
        ({"row_scale": None}, "row_scale: got None"),
        ({"row_scale": torch.zeros(2, ROWS - 1)}, "row_scale: got shape"),
        (
            {"col_data": torch.zeros(256, 250, dtype=torch.uint8)},
            "col_data: got 250 along dimension 1, wanted a multiple",
        ),
        ({"col_data": torch.zeros(256, 128, dtype=torch.uint8)}, "from 256 on"),
        ({"col_scale": torch.zeros(1, 256)}, "col_scale: got shape"),
        ({"x": Summed(X, torch.zeros(1, 256))}, "sums: got shape"),
        ({"fp8": "e3m4"}, "fp8: got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_quantize_float8_block(**(GOOD | changes))


def test_nvfp4_that_does_not_fit_is_refused():
    codec = STOCHASTIC[0]
    good = codec.arguments(2) | codec.outputs(ROWS, 256, 2) | {"x": X, "table": TABLE}
    for changes, message in (
        (
            {"x": X[:, :250].contiguous(), "row_data": good["row_data"][:, :125].contiguous()},
            "rng_state: got 250 columns",
        ),
        ({"rng_state": STATE.float()}, "rng_state: got torch.float32"),
        ({"row_tensor_amax": None}, "row_tensor_amax: got None"),
        ({"col_tensor_amax": torch.ones(3)}, "col_tensor_amax: got shape"),
        ({"col_data": good["col_data"][:, :64].contiguous()}, "from 128 on"),
        ({"col_hadamard": 1, "four_over_six": "mae"}, "four_over_six: got 'mae' beside col_hadamard"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.grouped_quantize_nvfp4(**(good | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": torch.ones(3)}, "scale: got shape"),
        ({"amax": torch.ones(1)}, "amax: got shape"),
        ({"row_scale": torch.ones(1)}, "row_scale: got shape"),
        ({"row_data": None}, "row_data: got None"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changes, message):
    good = dict(scale=torch.ones(2), table=TABLE, fp8="e4m3", row_data=torch.zeros(ROWS, 256, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        ops.grouped_quantize_float8_tensor(X, **(good | changes))
