"""Quantizers by panels that are not square, simulated: the bytes of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from te_dist import ops
from tests.gpu.catalog import Call, catalog
from tests.gpu.twins import assert_same
from tests.simulation import build
from tests.simulation.test_catalog import blank

LANES = {
    ops.quantize_float8_tensor: "TallLanes",
    ops.quantize_mxfp8: "WideLanes",
    ops.grouped_quantize_mxfp8: "WideLanes",
}


def calls() -> list[Call]:
    """Of 16-bit elements: columns alone by one scale, MXFP8 of a whole number of wide panels; the least of groups."""
    by_columns = [call for call in catalog() if call.name.startswith("columns of tensor") and "bfloat16" in call.name]
    by_runs = [call for call in catalog() if call.name.startswith("mx (72, 512) torch.bfloat16 e4m3")]
    in_groups = [c for c in catalog() if c.op is ops.grouped_quantize_mxfp8 and c.name.endswith("512 torch.bfloat16")]
    return [*by_columns, *by_runs, *in_groups]


def chosen() -> Iterator[Any]:
    """In every run one FP8 type, and of groups those of one quantizer and the smallest."""
    for call in calls():
        rare = call.op is ops.quantize_float8_tensor and "e5m2" in call.name
        if call.op is ops.grouped_quantize_mxfp8:
            rare = not any(part in call.name for part in (" many ", "(32, 32)"))
        yield pytest.param(call, id=call.name, marks=pytest.mark.exhaustive if rare else ())


@pytest.mark.parametrize("call", list(chosen()))
def test_bytes_are_those_of_the_cpu(call: Call, monkeypatch: pytest.MonkeyPatch, request) -> None:
    want, got, launched = blank(call), blank(call), []
    want.run()
    launch = build.launch
    monkeypatch.setattr(build, "launch", lambda spec, *rest: (launched.append(spec.template), launch(spec, *rest)))
    request.getfixturevalue("simulated")
    got.run()
    for name, output in got.outputs.items():
        assert_same(output, want.outputs[name], f"{name} of {call.name}")
    is_empty = not all(call.inputs["x"].shape)
    assert is_empty or any(LANES[call.op] in template for template in launched), launched
