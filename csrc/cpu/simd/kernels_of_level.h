// The kernels of the SIMD level this file is compiled for.
#pragma once

#include "../kernels.h"

namespace te_dist::cpu::TE_DIST_ISA {

void tile_amax(const TileAmax& op, int threads);
void quantize_float8_tensor(const QuantizeFloat8Tensor& op, int threads);
void quantize_float8_block(const QuantizeFloat8Block& op, int threads);
void quantize_mxfp8(const QuantizeMxFp8& op, int threads);
void quantize_nvfp4(const QuantizeNvFp4& op, int threads);
void hadamard(const Hadamard& op, int threads);
void evaluate(const Evaluate& op, int threads);
void panel_sums(const ColumnSums& op, int threads);
void row_sums(const RowSums& op, int threads);
void rms_rstd(const RmsRstd& op, int threads);
void dequantize_float8(const DequantizeFloat8& op, int threads);
void dequantize_mxfp8(const DequantizeMxFp8& op, int threads);
void dequantize_nvfp4(const DequantizeNvFp4& op, int threads);
void transpose(const Transpose& op, int threads);
void multi_adam(const MultiAdam& op, int threads);
void multi_adam_compact(const MultiAdamCompact& op, int threads);
void route(const Route& op, int threads);
void route_gradient(const RouteGradient& op, int threads);

}  // namespace te_dist::cpu::TE_DIST_ISA
