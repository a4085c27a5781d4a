"""What products of decoded operands refuse, and which kernel they choose: without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.gemm_decoded import half_of, width_of
from te_dist.kernels.runtime import recording
from te_dist.ops.gemm_decoded import Coded

U8, F32 = torch.uint8, torch.float32


def powers(kept: int, summed: int, *, turned: bool = False, phase: int = 0) -> Coded:
    """MXFP8 on the meta device."""
    codes, scale = meta(kept, summed), meta(kept, (phase + summed - 1) // 32 + 1)
    if turned:
        codes, scale = meta(summed, kept).t(), meta(scale.shape[1], kept).t()
    return Coded(codes, "e4m3", scale, (1, 32), (0, phase))


def plain(kept: int, summed: int, dtype: torch.dtype = torch.bfloat16) -> Coded:
    return Coded(meta(kept, summed, dtype=dtype), str(dtype).removeprefix("torch."))


def meta(*shape: int, dtype: torch.dtype = U8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chosen(a: Coded, b: Coded, **options: object) -> str:
    """The kernel that multiplies two operands."""
    out = options.pop("out", meta(a.shape[0], b.shape[0], dtype=torch.bfloat16))
    with recording() as specs:
        ops.gemm_decoded(a, b, out=out, **options)
    (spec,) = specs
    return spec.template


REFUSED = {
    "use torch.mm": (plain(8, 64), plain(8, 64, torch.float16)),
    "cast them to bf16": (plain(8, 64, F32), powers(8, 64)),
    "sum over one dimension": (powers(8, 64), powers(8, 96)),
    "cut both matrices": (powers(8, 64, phase=16), powers(8, 64)),
    "wanted e2m1 with scales": (Coded(meta(8, 32), "e2m1"), powers(8, 64)),
    "allocate it as its field declares": (powers(8, 64)._replace(scale=meta(8, 3)), powers(8, 64)),
    "contiguous dimension, the summed one": (powers(8, 64)._replace(codes=meta(8, 128)[:, ::2]), powers(8, 64)),
    "kept dimension contiguous": (powers(8, 64, turned=True)._replace(scale=meta(8, 2)), powers(8, 64)),
    "choose one of \\(1, 32\\)": (powers(8, 64)._replace(tile=(1, 64), scale=meta(8, 1)), powers(8, 64)),
    "view them as their type": (Coded(meta(8, 64), "bfloat16"), powers(8, 64)),
    "factor": (powers(8, 64)._replace(factor=meta(7, 1, dtype=F32)), powers(8, 64)),
}


@pytest.mark.parametrize("remedy", REFUSED)
def test_what_does_not_fit_is_refused_with_a_remedy(remedy):
    for a, b in (REFUSED[remedy], REFUSED[remedy][::-1]):
        with pytest.raises(ValueError, match=remedy):
            chosen(a, b)


def test_outputs_and_biases_that_do_not_fit_are_refused():
    a, b = powers(8, 64), powers(16, 64)
    with pytest.raises(ValueError, match="float32"):
        chosen(a, b, accumulate=True)
    with pytest.raises(ValueError, match="out"):
        chosen(a, b, out=meta(16, 8, dtype=F32))
    with pytest.raises(ValueError, match="bias"):
        chosen(a, b, bias=meta(8, dtype=F32))


def test_products_of_cpu_tensors_are_refused():
    a = Coded(torch.zeros(8, 64, dtype=U8), "e4m3")
    with pytest.raises(NotImplementedError, match="runs on CUDA"):
        ops.gemm_decoded(a, a, out=torch.zeros(8, 8))


def test_fp16_is_multiplied_where_no_power_of_two_is_folded_in():
    assert half_of(("e4m3", 0), ("float16", 0)) == "float16"
    assert half_of(("e2m1", 16), ("e5m2", 0)) == "float16"
    assert half_of(("e2m1", 16), ("e4m3", 32)) == "bfloat16"
    assert half_of(("float16", 0), ("e4m3", 32)) == "bfloat16"
    assert half_of(("bfloat16", 0), ("e4m3", 0)) == "bfloat16"


def test_tiles_are_wide_where_they_are_many():
    assert width_of(8192, 4096, scaled_sums=False) == 256
    assert width_of(128, 4096, scaled_sums=False) == 128
    assert width_of(8192, 4096, scaled_sums=True) == 128


def test_sources_say_how_operands_lie():
    assert "32, Along::kSummed, 16>, Source<E4M3, Scaling::kPowers, 32, Along::kKept, 16>" in chosen(
        powers(128, 64), powers(128, 64, turned=True)
    )
    assert "32, Along::kSummed, 1>" in chosen(powers(128, 72), powers(128, 72))
    assert "32, Along::kSummed, 1>" in chosen(powers(128, 64, phase=8), powers(128, 64, phase=8))
