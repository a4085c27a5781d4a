#include "kernels_of_level.h"

namespace te_dist::cpu::TE_DIST_ISA {

extern const Kernels kKernels;
const Kernels kKernels{
    tile_amax,  quantize_float8_tensor, quantize_float8_block, quantize_mxfp8,  quantize_nvfp4,   hadamard, evaluate,
    panel_sums, row_sums, rms_rstd,     dequantize_float8,     dequantize_mxfp8, dequantize_nvfp4, transpose,
    multi_adam, multi_adam_compact,     route,                 route_gradient,
};

}  // namespace te_dist::cpu::TE_DIST_ISA
