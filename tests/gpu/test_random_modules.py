"""Modules that a seed draws, on the GPU: near those of the CPU, the same bits again, and refused alike."""

from __future__ import annotations

import re

import pytest
import torch

from te_dist.testing import assert_bitwise
from tests.nn.random_modules import draw
from tests.nn.recipes import relative_error

pytestmark = pytest.mark.gpu

FEW = 160
OF_16 = "(in|out)_features=.* does not fit .* multiples of 16 "  # of the GPU's kernels alone
SEEDS = [seed if seed < FEW else pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4000)]
# Activations that round otherwise are quantized otherwise, and a token near a tie goes to another expert.
FAR = {"MoE": 0.5, "nvfp4": 0.35, "hybrid": 0.35}


@pytest.mark.parametrize("seed", SEEDS)
def test_modules_compute_what_they_do_on_the_cpu(seed: int) -> None:
    drawn = draw(seed)
    try:
        want = drawn.run(drawn.build("cpu"), "cpu")
    except (NotImplementedError, ValueError) as refusal:
        with pytest.raises((type(refusal), ValueError), match=f"{re.escape(str(refusal)[:30])}|{OF_16}"):
            drawn.run(drawn.build("cuda"), "cuda")
        return
    try:
        module = drawn.build("cuda")
        got = drawn.run(module, "cuda")
    except ValueError as refusal:
        assert re.search(OF_16, str(refusal)), refusal
        assert any(extent % 16 for extent in drawn.sizes), drawn
        return
    again = drawn.run(module, "cuda") if not drawn.recipe.startswith("delayed") else got
    assert got.keys() == want.keys()
    far = max(limit for name, limit in {"": 0.12, **FAR}.items() if name in f"{drawn.kind} {drawn.recipe}")
    for name, value in got.items():
        assert_bitwise(again[name], value, f"{name} of {drawn}")
        assert (value.shape, value.dtype) == (want[name].shape, want[name].dtype), f"{name} of {drawn}"
        its, there = value.cpu().float(), want[name].float()
        assert torch.equal(its.isfinite(), there.isfinite()), f"{name} of {drawn}"
        if there.isfinite().all() and there.norm() > 1e-6:
            assert relative_error(its, there) < far, f"{name} of {drawn}"
