"""Ops on plain tensors: `torch.library` schemas over the compiled kernels, one file per op.

All outputs are arguments. A tile grid is anchored at the whole matrix; `phase` says where in a tile an input starts.
"""

from te_dist.ops.add_parts import add_parts
from te_dist.ops.advance_histories import advance_histories
from te_dist.ops.assemble import assemble, assemble_chunks
from te_dist.ops.clear_rest import clear_rest
from te_dist.ops.dequantize_float8 import dequantize_float8
from te_dist.ops.dequantize_mxfp8 import dequantize_mxfp8
from te_dist.ops.dequantize_nvfp4 import dequantize_nvfp4
from te_dist.ops.direction_amax import direction_amax
from te_dist.ops.evaluate import evaluate
from te_dist.ops.gather_sum import gather_sum
from te_dist.ops.gemm_decoded import gemm_decoded
from te_dist.ops.gemm_float8_block import gemm_float8_block
from te_dist.ops.gemm_float8_tensor import gemm_float8_tensor
from te_dist.ops.gemm_half import gemm_half
from te_dist.ops.group_sums import group_sums
from te_dist.ops.group_table import group_table
from te_dist.ops.grouped_amax import grouped_amax
from te_dist.ops.grouped_direction_amax import grouped_direction_amax
from te_dist.ops.grouped_gemm_decoded import grouped_gemm_decoded
from te_dist.ops.grouped_gemm_float8_block import grouped_gemm_float8_block
from te_dist.ops.grouped_gemm_float8_tensor import grouped_gemm_float8_tensor
from te_dist.ops.grouped_gemm_half import grouped_gemm_half
from te_dist.ops.grouped_quantize_float8_block import grouped_quantize_float8_block
from te_dist.ops.grouped_quantize_float8_current import grouped_quantize_float8_current
from te_dist.ops.grouped_quantize_float8_tensor import grouped_quantize_float8_tensor
from te_dist.ops.grouped_quantize_mxfp8 import grouped_quantize_mxfp8
from te_dist.ops.grouped_quantize_nvfp4 import grouped_quantize_nvfp4
from te_dist.ops.grouped_wgrad_decoded import grouped_wgrad_decoded
from te_dist.ops.grouped_wgrad_float8_block import grouped_wgrad_float8_block
from te_dist.ops.grouped_wgrad_float8_tensor import grouped_wgrad_float8_tensor
from te_dist.ops.grouped_wgrad_half import grouped_wgrad_half
from te_dist.ops.hadamard import hadamard
from te_dist.ops.panel_sums import panel_sums
from te_dist.ops.quantize_float8_block import quantize_float8_block
from te_dist.ops.quantize_float8_current import quantize_float8_current
from te_dist.ops.quantize_float8_tensor import quantize_float8_tensor
from te_dist.ops.quantize_mxfp8 import quantize_mxfp8
from te_dist.ops.quantize_nvfp4 import quantize_nvfp4
from te_dist.ops.rms_rstd import rms_rstd
from te_dist.ops.route import route, route_gradient
from te_dist.ops.sort_by_expert import sort_by_expert
from te_dist.ops.tile_amax import tile_amax
from te_dist.ops.transpose import transpose

__all__ = [
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
