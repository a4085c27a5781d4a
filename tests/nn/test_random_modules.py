"""Modules that a seed draws: compiled and not compiled the same bits, and the same refusals."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError

from te_dist.testing import assert_bitwise
from tests.nn.random_modules import draw

FEW = 40
SEEDS = [seed if seed < FEW else pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(400)]


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_modules_have_the_bits_of_eager_ones(seed: int) -> None:
    drawn = draw(seed)
    torch.compiler.reset()
    try:
        module = drawn.build("cpu")
        want = drawn.run(module, "cpu")
    except (NotImplementedError, ValueError) as refusal:
        told = re.escape(str(refusal)[:40])
        with pytest.raises((type(refusal), InternalTorchDynamoError), match=told):
            drawn.run(torch.compile(drawn.build("cpu"), backend="aot_eager"), "cpu")
        return
    module = drawn.build("cpu")  # of histories that have not moved
    got = drawn.run(torch.compile(module, backend="aot_eager"), "cpu")
    got = {name.removeprefix("_orig_mod."): value for name, value in got.items()}
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_bitwise(value, want[name], f"{name} of {drawn}")
