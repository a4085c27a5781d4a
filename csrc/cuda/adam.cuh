// Adam: as the source of a kernel that goes on with the updated values, and alone.
//
// A launch of AdvanceSteps comes first: it counts the step and leaves what the others multiply by.
#pragma once

#include "../numerics/adam.h"
#include "pass.cuh"

namespace te_dist::cuda {

// What the device alone knows of a step. GradScaler's protocol: gradients are divided by `grad_scale`, and where `found_inf`
// is not 0 the step is left out.
struct AdamSignals {
  const float* lr;          // replaces that of the rule where it is not null
  const float* grad_scale;  // null: 1
  const float* found_inf;   // null: 0
};

// Counts the step of every parameter of a group, one to a thread, unless it is left out.
struct AdvanceSteps {
  static constexpr int kThreads = 128;
  static constexpr int kBlocks = 1;

  struct Params {
    AdamRule rule;
    AdamSignals signals;
    float* const* steps;
    AdamFactors* factors;
    int64_t count;
    uint32_t* is_left_out;
  };

  TE_DIST_INLINE void run(const Params& p) {
    const bool is_left_out = p.signals.found_inf && *p.signals.found_inf != 0.0f;
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (index == 0) *p.is_left_out = is_left_out;
    if (index >= p.count || is_left_out) return;
    const float step = *p.steps[index] + 1.0f;
    const double lr = p.signals.lr ? double(*p.signals.lr) : p.rule.lr;
    *p.steps[index] = step;
    p.factors[index] = adam_factors(p.rule, lr, step, p.signals.grad_scale ? *p.signals.grad_scale : 1.0f);
  }
};

// Elements that the launch overwrites, and nobody reads again soon: not through the cache for what is never written.
template <int kBytes, int kWidth>
TE_DIST_INLINE void load_once(const char* first, const Inside& inside, uint32_t* words) {
  static_assert(kWidth == 16 || kWidth == 8 || kWidth == 4 || kWidth == 2 || kWidth == 1, "no such access");
#pragma unroll
  for (int i = 0; i < kBytes; i += kWidth) {
    if constexpr (kWidth == 16) {
      const uint4 v = inside.has(i) ? __ldcs(reinterpret_cast<const uint4*>(first + i)) : make_uint4(0, 0, 0, 0);
      words[i / 4] = v.x, words[i / 4 + 1] = v.y, words[i / 4 + 2] = v.z, words[i / 4 + 3] = v.w;
    } else if constexpr (kWidth == 4) {
      words[i / 4] = inside.has(i) ? __ldcs(reinterpret_cast<const uint32_t*>(first + i)) : 0;
    } else if constexpr (kWidth == 8) {
      const uint2 v = inside.has(i) ? __ldcs(reinterpret_cast<const uint2*>(first + i)) : make_uint2(0, 0);
      words[i / 4] = v.x, words[i / 4 + 1] = v.y;
    } else {
      uint32_t piece = 0;
      if constexpr (kWidth == 2) {
        if (inside.has(i)) piece = __ldcs(reinterpret_cast<const uint16_t*>(first + i));
      } else {
        if (inside.has(i)) piece = __ldcs(reinterpret_cast<const uint8_t*>(first + i));
      }
      words[i / 4] = i % 4 ? words[i / 4] | piece << (8 * (i % 4)) : piece;
    }
  }
}

// Updates as it reads, and hands on the values that it wrote. Grad, Value: elements of the gradient and of what is updated.
template <class Grad, class Value>
struct Adam {
  using Element = Float32;
  static constexpr bool kIsComputed = true, kHasSums = false, kHasRowSums = false, kIsPaired = false;

  struct Params {
    void* value;
    float* exp_avg;
    float* exp_avg_sq;
    const void* const* grad;
    const AdamFactors* factors;
  };

  template <int kWidth>
  struct Reader {
    const Params& p;
    const AdamFactors factors;
    const char* grad;
    int64_t at, stride;
    Inside cols;

    TE_DIST_DEVICE Reader(const Params& params, const Extents& extents, int64_t row, int64_t col, const Inside& inside)
        : p(params),
          factors(*params.factors),
          grad(static_cast<const char*>(*params.grad)),
          at(row * extents.cols + col),
          stride(extents.cols),
          cols(inside) {}

    template <class Type>
    TE_DIST_INLINE void load(const void* first, int64_t index, const Inside& inside, float (&values)[kPatch]) {
      constexpr int kBytes = kPatch * Type::kBytes, kAccess = kWidth < 16 ? Type::kBytes : 16;
      uint32_t words[kPatch / Type::kPerWord];
      load_once<kBytes, kAccess>(static_cast<const char*>(first) + index * Type::kBytes, inside.scaled(Type::kBytes), words);
#pragma unroll
      for (int j = 0; j < kPatch; ++j) values[j] = Type::value(words[j / Type::kPerWord], j % Type::kPerWord);
    }

    // The updated values of the next rows; zeros where the matrix has none.
    template <int kRows>
    TE_DIST_DEVICE void read(const Inside& rows, Octet<Float32> (&words)[kRows]) {
#pragma unroll
      for (int i = 0; i < kRows; ++i, at += stride) update(cols.only_if(rows.has(i)), words[i]);
    }

    TE_DIST_DEVICE void update(const Inside& inside, Octet<Float32>& words) const {
      float values[kPatch], exp_avg[kPatch], exp_avg_sq[kPatch], gradient[kPatch];
      load<Value>(p.value, at, inside, values);
      load<Float32>(p.exp_avg, at, inside, exp_avg);
      load<Float32>(p.exp_avg_sq, at, inside, exp_avg_sq);
      load<Grad>(grad, at, inside, gradient);
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        AdamState<float> state{values[j], exp_avg[j], exp_avg_sq[j]};
        adam_update(factors, gradient[j], state);
        values[j] = state.value, exp_avg[j] = state.exp_avg, exp_avg_sq[j] = state.exp_avg_sq;
        words[j] = inside.has(j) ? bits_of(values[j]) : 0u;
      }
      store_octet<Value, kWidth>(p.value, at, inside, values);
      store_octet<Float32, kWidth>(p.exp_avg, at, inside, exp_avg);
      store_octet<Float32, kWidth>(p.exp_avg_sq, at, inside, exp_avg_sq);
    }
  };
};

}  // namespace te_dist::cuda
