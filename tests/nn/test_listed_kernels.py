"""A cache that `te-dist kernels build` has filled serves models on hosts where nothing can be compiled."""

from __future__ import annotations

import pytest
import torch

from te_dist.kernels import variants
from te_dist.kernels.arguments import ELEMENTS
from tests.nn import launched


@pytest.mark.every_run(dtype=(torch.bfloat16,), quantized=(True,))
@pytest.mark.parametrize(
    ("dtype", "quantized"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_what_is_launched_by_recipes_as_they_come_is_listed(dtype, quantized):
    listed = {spec.template for spec in variants.variants(ELEMENTS[dtype])}
    for made_by in launched.RECIPES:
        found = {spec.template for spec in launched.kernels(made_by, dtype, quantized=quantized)}
        assert any("Quantize" in template for template in found)
        assert found <= listed, f"{made_by} launches what is not listed: {sorted(found - listed)}"
