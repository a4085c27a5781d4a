// The kernels, and the table of them that is built once for every SIMD level.
#pragma once

#include "../numerics/adam.h"
#include "../numerics/adam_compact.h"
#include "../numerics/routing.h"
#include "types.h"

namespace te_dist::cpu {

struct TileAmax {
  Source x;
  Phase phase;
  Tile tile;
  float* out;
};

struct QuantizeFloat8Tensor {
  Source x;
  float scale;
  Fp8 fp8;
  uint8_t* row_data;  // (rows, cols) or null
  uint8_t* col_data;  // (cols, rows) or null
};

struct QuantizeFloat8Block {
  Source x;
  Phase phase;
  Fp8 fp8;
  bool pow2;
  float eps;
  BlockOutput<float> row;  // data (rows, cols)
  BlockOutput<float> col;  // data (cols, rows)
};

struct QuantizeMxFp8 {
  Source x;
  Phase phase;
  Fp8 fp8;
  BlockOutput<uint8_t> row;  // data (rows, cols)
  BlockOutput<uint8_t> col;  // data (rows, cols)
};

enum class FourOverSix { kNone, kMeanAbsolute, kMeanSquare };

struct QuantizeNvFp4 {
  Source x;
  Phase phase;
  int e4m3_max;
  FourOverSix four_over_six;
  BlockOutput<uint8_t> row;            // data (rows, cols / 2)
  BlockOutput<uint8_t> col;            // data (cols, rows / 2)
  Plane<const float> row_tensor_amax;  // row stride 0: one for the tensor
  Plane<const float> col_tensor_amax;
  const int64_t* rng_state;  // (seed, offset); null: to nearest even
};

struct Hadamard {
  Matrix x;
  uint32_t sign_mask;
  uint16_t* out;
};

struct Evaluate {
  Source x;
  void* out;
};

struct ColumnSums {
  Source x;
  float* out;  // (panels of 128 rows, cols)
};

struct RowSums {
  Source x;    // the gradient of SwiGLU
  float* out;  // (panels of 128 columns of its grad, rows)
};

struct RmsRstd {
  Matrix x;
  float eps;
  float* out;  // (rows,)
};

struct DequantizeFloat8 {
  Plane<const uint8_t> data;
  Plane<const float> scale;
  Tile tile;
  Phase phase;
  Fp8 fp8;
  Matrix out;
};

struct DequantizeMxFp8 {
  Plane<const uint8_t> data;
  Plane<const uint8_t> scale;
  Tile grain;
  Phase phase;
  Fp8 fp8;
  Matrix out;
};

struct DequantizeNvFp4 {
  const uint8_t* data;  // (rows, cols / 2), or (cols, rows / 2) where packed along rows
  int packed_dim;
  Plane<const uint8_t> scale;
  Tile grain;
  Phase phase;
  Plane<const float> amax;
  int e4m3_max;
  Matrix out;
};

struct Transpose {
  const void* src;
  void* out;
  int bits;
  int64_t rows;  // logical extents that are turned
  int64_t cols;
  int64_t src_cols;  // of a line, at least `cols`
  int64_t out_rows;  // of a line, at least `rows`; zeros behind these
};

constexpr int64_t kAdamChunk = 16384;  // elements that one thread updates at a time

struct AdamTensor {
  void* value;
  DType value_type;
  const void* grad;
  DType grad_type;
  float* exp_avg;
  float* exp_avg_sq;
  void* copy;  // of the updated value, or null
  DType copy_type;
  int64_t count;
};

struct MultiAdam {
  const AdamTensor* tensors;
  const AdamFactors* factors;  // of each
  const int64_t* ends;         // chunks of this tensor and of those before it
  int64_t num_tensors;
};

// How a value that is updated is kept: rounded to its type, or by chance, or as bf16 with the missing bits beside it.
enum class Keep { kNearest, kStochastic, kRemainder };

// Moments are fp32, bf16, or bytes: e4m3 with a scale for each kMomentBlock values of a row.
struct CompactTensor {
  Matrix value;
  Keep keep;
  uint16_t* remainder;
  Matrix grad;
  Matrix exp_avg;
  float* exp_avg_scale;
  Matrix exp_avg_sq;
  float* exp_avg_sq_scale;
  Matrix copy;  // no data: none is written
  AdamNoise noise;
  uint32_t step;
};

struct MultiAdamCompact {
  const CompactTensor* tensors;
  const AdamFactors* factors;  // of each
  const int64_t* ends;         // blocks of this tensor and of those before it
  int64_t num_tensors;
};

// What becomes of scores; see te_dist.ops.route.
struct RoutingRule {
  Score score;
  bool normalizes;
  float factor;
  int64_t num_groups;
  int64_t top_groups;
};

struct Route {
  const float* logits;  // (rows, cols)
  const float* bias;    // (cols,), or null
  int64_t rows;
  int64_t cols;
  int64_t count;  // that are chosen
  RoutingRule rule;
  int64_t* experts;      // (rows, count)
  float* probabilities;  // (rows, count)
  float* scores;         // (rows, cols), or null
  float* counts;         // (cols,), or null
};

struct RouteGradient {
  const float* logits;     // (rows, cols)
  const int64_t* experts;  // (rows, count)
  const float* grad;       // (rows, count)
  const float* of_scores;  // (cols,), or null
  int64_t rows;
  int64_t cols;
  int64_t count;
  RoutingRule rule;
  bool in_halves;
  void* out;  // f32 (rows, cols), or bf16 (rows, 2 cols)
};

struct Kernels {
  void (*tile_amax)(const TileAmax&, int threads);
  void (*quantize_float8_tensor)(const QuantizeFloat8Tensor&, int threads);
  void (*quantize_float8_block)(const QuantizeFloat8Block&, int threads);
  void (*quantize_mxfp8)(const QuantizeMxFp8&, int threads);
  void (*quantize_nvfp4)(const QuantizeNvFp4&, int threads);
  void (*hadamard)(const Hadamard&, int threads);
  void (*evaluate)(const Evaluate&, int threads);
  void (*panel_sums)(const ColumnSums&, int threads);
  void (*row_sums)(const RowSums&, int threads);
  void (*rms_rstd)(const RmsRstd&, int threads);
  void (*dequantize_float8)(const DequantizeFloat8&, int threads);
  void (*dequantize_mxfp8)(const DequantizeMxFp8&, int threads);
  void (*dequantize_nvfp4)(const DequantizeNvFp4&, int threads);
  void (*transpose)(const Transpose&, int threads);
  void (*multi_adam)(const MultiAdam&, int threads);
  void (*multi_adam_compact)(const MultiAdamCompact&, int threads);
  void (*route)(const Route&, int threads);
  void (*route_gradient)(const RouteGradient&, int threads);
};

}  // namespace te_dist::cpu
