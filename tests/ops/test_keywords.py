"""Keywords that an op does not take, or is not given, are named all at once."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match=r"quantize_float8_block: unknown keywords \['row_dta'\]"):
        ops.quantize_float8_block(torch.zeros(4, 4), phase=(0, 0), fp8="e4m3", pow2=False, eps=0.0, row_dta=None)


def test_missing_keywords_are_named() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(
        TypeError, match=r"missing keywords \['accumulate', 'b_tile', 'bias', 'row_factor', 'summed_dim', 'table'\]"
    ):
        ops.grouped_gemm_float8_block(one, one, one, one, fp8=("e4m3", "e4m3"), out=one)
