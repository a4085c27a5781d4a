"""Quantizers: which format a tensor is quantized into, under the names and arguments of TransformerEngine."""

from te_dist.quantizers.base import Fp8Type, Quantizer
from te_dist.quantizers.blockwise import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from te_dist.quantizers.hybrid import HybridQuantizedTensor, HybridQuantizer, IdentityQuantizer
from te_dist.quantizers.tensorwise import Float8CurrentScalingQuantizer, Float8Quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Fp8Type",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]
