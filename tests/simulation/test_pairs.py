"""Gradients of SwiGLU read in pairs of panels, simulated: the bytes of the CPU, where one panel follows the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from te_dist.kernels.inputs import Input
from te_dist.ops.source import SwiGluGradient
from te_dist.quantizers import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, Quantizer
from te_dist.tensor.grouped_rows import empty_rows
from te_dist.testing import assert_bitwise
from tests.nn.test_grouped_linear import normal
from tests.ops.grouped_quantize import POISON, routed
from tests.ops.sources import sums_of

HALVES = (256, 384)  # columns, two panels and three
ROWS, SIZES = 300, [5, 0, 300, 64]


def by_scales(count: int) -> Float8Quantizer:
    return Float8Quantizer(scale=torch.linspace(0.25, 0.5, count), amax=torch.zeros(count))


MATRICES = {
    "block": Float8BlockQuantizer(block_scaling_dim=1),
    "squares": Float8BlockQuantizer(),
    "mxfp8": MXFP8Quantizer(),
    "tensor": by_scales(1),
}
GROUPS = {"block": MATRICES["block"], "mxfp8": MATRICES["mxfp8"], "tensor": by_scales(len(SIZES))}
weighing = pytest.mark.parametrize("weighs", [False, True], ids=["plain", "weighed"])


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each input that was asked for in pairs came so."""
    found, in_pairs = [], Input.in_pairs

    def noting(self: Input, *args: int) -> Input:
        got = in_pairs(self, *args)
        found.append(got.source.is_pair)
        return got

    monkeypatch.setattr(Input, "in_pairs", noting)
    return found


def gradient(rows: int, half: int, *, weighs: bool) -> SwiGluGradient:
    x, grad = normal(rows, 2 * half).bfloat16(), normal(rows, half, seed=1).bfloat16()
    source = SwiGluGradient(x, grad, normal(rows, seed=2).sigmoid() if weighs else None)
    return replace(source, row_sums=sums_of(source)["row_sums"]) if weighs else source


def encoded(quantizer: Quantizer, source: SwiGluGradient) -> dict[str, Tensor]:
    return quantizer.encode(source).buffers | amax_of(quantizer)


def encoded_groups(quantizer: Quantizer, source: SwiGluGradient) -> dict[str, Tensor]:
    _, table = routed(SIZES)
    rows = empty_rows(quantizer.format(source.dtype), source.shape, table, dtype=source.dtype)
    for buffer in rows.buffers.values():  # not all of it belongs to a group
        buffer.view(torch.uint8).fill_(POISON)
    quantizer.write_groups(source, rows)
    return rows.buffers | amax_of(quantizer)


def amax_of(quantizer: Quantizer) -> dict[str, Tensor]:
    """What it recorded, which it forgets."""
    if not isinstance(quantizer, Float8Quantizer):
        return {}
    found = quantizer.amax.clone()
    quantizer.amax.zero_()
    return {"amax": found}


@weighing
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("encode", "quantizer"),
    [
        *((encoded, quantizer) for quantizer in MATRICES.values()),
        *((encoded_groups, quantizer) for quantizer in GROUPS.values()),
    ],
    ids=[*MATRICES, *(f"groups, {name}" for name in GROUPS)],
)
def test_bytes_are_those_of_the_cpu(
    encode: Callable[[Quantizer, SwiGluGradient], dict[str, Tensor]],
    quantizer: Quantizer,
    half: int,
    weighs: bool,
    pairs: list[bool],
    request: pytest.FixtureRequest,
) -> None:
    rows = ROWS if encode is encoded else routed(SIZES)[0]
    source = gradient(rows, half, weighs=weighs)
    want = encode(quantizer, source)
    sums, end = source.row_sums, rows if encode is encoded else sum(SIZES)
    request.getfixturevalue("simulated")
    source = gradient(rows, half, weighs=weighs)
    got = encode(quantizer, source)
    assert pairs == [True]
    for key, value in want.items():
        assert_bitwise(got[key], value, key)
    if weighs:
        assert_bitwise(source.row_sums[:, :end], sums[:, :end], "row_sums")


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("half", "is_pair"), [(128, True), (64, False), (192, False), (384, True)])
def test_pairs_are_of_whole_panels(half: int, is_pair: bool, pairs: list[bool]) -> None:
    MATRICES["mxfp8"].encode(gradient(40, half, weighs=False))
    assert pairs == [is_pair]


@pytest.mark.usefixtures("simulated")
def test_a_matrix_that_begins_inside_of_a_panel_is_read_one_by_one(pairs: list[bool]) -> None:
    source = gradient(40, HALVES[0], weighs=False)
    wide = torch.zeros(40, 2 * HALVES[0] + 8).bfloat16()
    wide[:, 1 : 2 * HALVES[0] + 1] = source.x
    MATRICES["mxfp8"].encode(replace(source, x=wide.flatten()[1 : 40 * 2 * HALVES[0] + 1].view(40, 2 * HALVES[0])))
    assert pairs == [False]
