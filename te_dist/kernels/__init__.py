"""CUDA kernels: compiled at first use by NVRTC for the GPU at hand, cached on disk, launched through the driver.

Functions named as ops take the arguments of their op and launch its kernel; the rest makes kernels.
"""

from te_dist.kernels.amax import tile_amax
from te_dist.kernels.compiler import CompilerError
from te_dist.kernels.dequantize import dequantize_float8, dequantize_mxfp8, dequantize_nvfp4
from te_dist.kernels.evaluation import evaluate, gather_sum, panel_sums, rms_rstd
from te_dist.kernels.gemm import gemm_float8_block
from te_dist.kernels.gemm_decoded import gemm_decoded
from te_dist.kernels.gemm_tensor import gemm_float8_tensor, gemm_half
from te_dist.kernels.grouped_decoded import grouped_gemm_decoded, grouped_wgrad_decoded
from te_dist.kernels.grouped_gemm import clear_rest, group_table, grouped_gemm_float8_block, grouped_wgrad_float8_block
from te_dist.kernels.grouped_quantize import (
    group_sums,
    grouped_amax,
    grouped_direction_amax,
    grouped_quantize_float8_block,
    grouped_quantize_float8_current,
    grouped_quantize_float8_tensor,
    grouped_quantize_mxfp8,
    grouped_quantize_nvfp4,
)
from te_dist.kernels.grouped_whole import (
    grouped_gemm_float8_tensor,
    grouped_gemm_half,
    grouped_wgrad_float8_tensor,
    grouped_wgrad_half,
)
from te_dist.kernels.histories import advance_histories
from te_dist.kernels.movement import add_parts, assemble, assemble_chunks, hadamard, transpose
from te_dist.kernels.quantize import (
    direction_amax,
    quantize_float8_block,
    quantize_float8_current,
    quantize_float8_tensor,
    quantize_mxfp8,
    quantize_nvfp4,
)
from te_dist.kernels.routing import route, route_gradient
from te_dist.kernels.sorting import sort_by_expert

__all__ = [
    "CompilerError",
    "add_parts",
    "advance_histories",
    "assemble",
    "assemble_chunks",
    "clear_rest",
    "dequantize_float8",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "direction_amax",
    "evaluate",
    "gather_sum",
    "gemm_decoded",
    "gemm_float8_block",
    "gemm_float8_tensor",
    "gemm_half",
    "group_sums",
    "group_table",
    "grouped_amax",
    "grouped_direction_amax",
    "grouped_gemm_decoded",
    "grouped_gemm_float8_block",
    "grouped_gemm_float8_tensor",
    "grouped_gemm_half",
    "grouped_quantize_float8_block",
    "grouped_quantize_float8_current",
    "grouped_quantize_float8_tensor",
    "grouped_quantize_mxfp8",
    "grouped_quantize_nvfp4",
    "grouped_wgrad_decoded",
    "grouped_wgrad_float8_block",
    "grouped_wgrad_float8_tensor",
    "grouped_wgrad_half",
    "hadamard",
    "panel_sums",
    "quantize_float8_block",
    "quantize_float8_current",
    "quantize_float8_tensor",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "rms_rstd",
    "route",
    "route_gradient",
    "sort_by_expert",
    "tile_amax",
    "transpose",
]
