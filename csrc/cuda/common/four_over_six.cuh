// NVFP4: which of two scales of a tile loses less, its largest value becoming 6 or 4.
#pragma once

#include "nvfp4_scale.cuh"
#include "runs.cuh"

namespace te_dist::cuda {

enum class FourOverSix { kNone, kMeanAbsolute, kMeanSquare };

// RN(a / divisor) for 6, 1536 and 2688, whose quotient by the reciprocal is off by little enough for one correction, for
// every mantissa of `a`; zero, or without intermediates that leave the normal numbers.
TE_DIST_INLINE float divided(float a, float divisor, float reciprocal) {
  const float quotient = a * reciprocal;
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, a), reciprocal, quotient);
}

// Tensor amaxes with which errors, and their squares, neither overflow nor lose bits that count; and zero.
TE_DIST_INLINE bool is_ordinary_amax(float tensor_amax) {
  return tensor_amax == 0.0f || (tensor_amax > 0x1p-40f && tensor_amax < 0x1p40f);
}

// Two scales of a tile: its largest value becomes 6, or 4. kIsOrdinary: the amax of the tensor is.
template <bool kIsOrdinary>
TE_DIST_INLINE void find_two_scales(float amax, const TensorScale& tensor, Scale (&scales)[2]) {
  // As nvfp4_four_over_six_code. What is rounded otherwise below the normal numbers has code 0 either way.
  const float sixth = kIsOrdinary ? divided(amax, 6.0f, float_of(kReciprocalOf6)) : amax / 6.0f;
  const float base = sixth * tensor.scale;
  const uint32_t codes = encode_pair<E4M3>(fminf(base, 448.0f), fminf(base * 1.5f, 448.0f));
  scales[0].code = codes & 0xFFu, scales[1].code = codes >> 8;
  const float2 decoded = decode_pair<E4M3>(codes);
  find_multipliers({decoded.x * tensor.inverse, decoded.y * tensor.inverse}, kIsOrdinary, scales);
}

// Errors of values under two scales, as nvfp4_decode_error has them. kIsOrdinary: values are finite, and the amax of the
// tensor is ordinary.
template <FourOverSix kNorm, bool kIsOrdinary>
struct DecodeErrors {
  const Scale (&scales)[2];
  float tensor_amax, e4m3_max;

  TE_DIST_DEVICE float of(float value, const Scale& scale) const {
    const float block_scale = decode_pair<E4M3>(scale.code).x;
    if constexpr (!kIsOrdinary) {
      return nvfp4_decode_error(E2M1::encode(value * scale.multiplier), block_scale, tensor_amax, e4m3_max, value);
    }
    const float reciprocal = float_of(e4m3_max == 256.0f ? kReciprocalOf1536 : kReciprocalOf2688);
    const float size = fabsf(value), nearest = float_of(round_e2m1<false>(size * scale.multiplier, 0) << 22) * 0x1p126f;
    return divided(nearest * block_scale * tensor_amax, 6.0f * e4m3_max, reciprocal) - size;
  }

  TE_DIST_DEVICE void add(float value, float (&sums)[2]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float error = of(value, scales[c]);
      sums[c] += kNorm == FourOverSix::kMeanSquare ? error * error : fabsf(error);
    }
  }
};

// Nearly the same in units of the block scales, in half the instructions: how far a magnitude times a multiplier is from
// the nearest e2m1 value, for products below 7.
template <FourOverSix kNorm>
struct NearErrors {
  static constexpr float kSplit = 0x1p22f + 1.0f;  // leaves two bits of a significand

  float multipliers[2], splits[2];

  TE_DIST_DEVICE explicit NearErrors(const Scale (&scales)[2])
      : multipliers{scales[0].multiplier, scales[1].multiplier},
        splits{scales[0].multiplier * kSplit, scales[1].multiplier * kSplit} {}

  // Splits a product (T. J. Dekker, A floating-point technique for extending the available precision, 1971): with kSplit
  // times that in `high`, `high + (product - high)` is the product rounded to two bits. Below 1 steps stay those of 1.
  TE_DIST_DEVICE void add(float value, float (&sums)[2]) const {
    const float size = fabsf(value);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float high = fmaxf(size * splits[c], kSplit);
      const float nearest = __fadd_rn(high, __fmaf_rn(size, multipliers[c], -high));
      const float error = __fmaf_rn(size, multipliers[c], -nearest);
      sums[c] = kNorm == FourOverSix::kMeanSquare ? __fmaf_rn(error, error, sums[c]) : sums[c] + fabsf(error);
    }
  }
};

// What sums of `NearErrors` say about two scales.
template <FourOverSix kNorm>
struct NearSums {
  float sums[2], doubt;

  // Sums over `count` values. How far they may be off, in 2^-20 of what 1 decodes to: codes decode to themselves but for
  // 2^-23 of up to 6, multipliers are reciprocals but for 2^-22 of up to 7, products are rounded by 2^-24 of up to 7,
  // together less than 3 for each value; sums are rounded by less than 3 times themselves. Of squares, 2 * distance * 3
  // where distance <= 2 * distance^2 + 1 / 8: 1 for each value, and with the rounding 15 times the sum.
  TE_DIST_DEVICE NearSums(const Scale (&scales)[2], const float (&near)[2], int count) : sums(), doubt(0.0f) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float block_scale = decode_pair<E4M3>(scales[c].code).x;
      const float unit = kNorm == FourOverSix::kMeanSquare ? block_scale * block_scale : block_scale;
      sums[c] = unit * near[c];
      doubt += unit * 0x1p-16f * (near[c] + float(count) * 0.25f);
    }
  }

  // Whether the order of exact sums is that of these; not where one is not a number.
  TE_DIST_DEVICE bool are_apart() const { return fabsf(sums[1] - sums[0]) > doubt; }
};

// Between two ways to scale each tile of a strip: the one that loses less; the largest value becomes 6 where they tie.
template <FourOverSix kNorm, class Strip>
struct Choice {
  static constexpr bool kAlongRows = Strip::kRows == kRuns;

  Strip& strip;
  float e4m3_max;

  // `own`: the largest magnitude that this thread has of a tile, whatever its `amax` is. `tensor_of`: the scale of the
  // tensor, for a run.
  template <class TensorOf>
  TE_DIST_DEVICE void of_runs(const float (&amax)[kRuns], const float (&own)[kRuns], const TensorOf& tensor_of,
                              Scale (&chosen)[kRuns]) const {
    uint32_t in_doubt = (1u << kRuns) - 1;
    if (__builtin_expect(are_ordinary(tensor_of), 1)) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        Scale scales[2];
        const TensorScale tensor = tensor_of(run);
        find_two_scales<true>(fabsf(amax[run]), tensor, scales);
        float sums[2];
        add_run(run, NearErrors<kNorm>(scales), sums);
        strip.pack();
        in_doubt ^= uint32_t(chooses<kRun>(scales, sums, fabsf(own[run]), tensor.amax, chosen[run])) << run;
      }
    }
    if (__builtin_expect(in_doubt == 0, 1)) return;
    const Copy copy(strip);
    float amaxes[kRuns], owns[kRuns];
    Scale exact[kRuns];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      amaxes[run] = fabsf(amax[run]), owns[run] = fabsf(own[run]), exact[run] = chosen[run];
    }
#pragma unroll 1
    for (int run = 0; run < kRuns; ++run) {
      if ((in_doubt >> run & 1) == 0) continue;
      const TensorScale tensor = tensor_of(run);
      Scale scales[2];
      find_two_scales<false>(amaxes[run], tensor, scales);
      float sums[2];
      add_exactly(copy, run, scales, tensor.amax, owns[run], sums);
      exact[run] = sums[1] < sums[0] ? scales[1] : scales[0];
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) chosen[run] = exact[run];
  }

  TE_DIST_DEVICE Scale of_square(float amax, float own, const TensorScale& tensor) const {
    Scale scales[2];
    float sums[2];
    if (__builtin_expect(!__any_sync(kFullWarp, !is_ordinary_amax(tensor.amax)), 1)) {
      float rows[kRuns][2];
      find_two_scales<true>(amax, tensor, scales);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) add_run(run, NearErrors<kNorm>(scales), rows[run]);
      strip.pack();
      fold(rows, sums);
      Scale chosen;
      const bool is_sure = chooses<kRun * kRun>(scales, sums, own, tensor.amax, chosen);
      if (__builtin_expect(!__any_sync(kFullWarp, !is_sure), 1)) return chosen;
    }
    find_two_scales<false>(amax, tensor, scales);
    const Copy copy(strip);
    float exact[kRuns][2];
#pragma unroll 1
    for (int run = 0; run < kRuns; ++run) add_exactly(copy, run, scales, tensor.amax, own, exact[run]);
    fold(exact, sums);
    return sums[1] < sums[0] ? scales[1] : scales[0];
  }

 private:
  // Words that are not in registers: loops over their runs are short, and rare.
  struct Copy {
    uint32_t words[Strip::kRows][Strip::kWords];

    TE_DIST_DEVICE explicit Copy(const Strip& strip) {
#pragma unroll
      for (int i = 0; i < Strip::kRows; ++i) {
#pragma unroll
        for (int w = 0; w < Strip::kWords; ++w) words[i][w] = strip.words[i][w];
      }
    }
  };

  template <class TensorOf>
  TE_DIST_INLINE bool are_ordinary(const TensorOf& tensor_of) {
    bool all = true;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) all = all && is_ordinary_amax(tensor_of(run).amax);
    return all;
  }

  // Returns whether near sums, of kCount values, decide; then `chosen` is the scale.
  template <int kCount>
  TE_DIST_INLINE bool chooses(const Scale (&scales)[2], const float (&sums)[2], float own, float tensor_amax, Scale& chosen) {
    const NearSums<kNorm> near(scales, sums, kCount);
    const bool is_same = scales[0].code == scales[1].code;
    const bool is_near = own * fmaxf(scales[0].multiplier, scales[1].multiplier) < 7.0f;
    chosen = near.sums[1] < near.sums[0] && !is_same ? scales[1] : scales[0];
    return is_same || (tensor_amax > 0.0f && is_near && near.are_apart());
  }

  TE_DIST_DEVICE void add_run(int run, const NearErrors<kNorm>& errors, float (&sums)[2]) const {
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kRun; ++i) errors.add(strip.value(run, i), sums);
  }

  TE_DIST_DEVICE void add_exactly(const Copy& copy, int run, const Scale (&scales)[2], float tensor_amax, float own,
                                  float (&sums)[2]) const {
    sums[0] = sums[1] = 0.0f;
    if (is_ordinary_amax(tensor_amax) && own < float_of(kInfinityBits)) {
      const DecodeErrors<kNorm, true> errors{scales, tensor_amax, e4m3_max};
#pragma unroll 4
      for (int i = 0; i < kRun; ++i) errors.add(Strip::value(copy.words, run, i), sums);
    } else {
      const DecodeErrors<kNorm, false> errors{scales, tensor_amax, e4m3_max};
      const Inside inside = (kAlongRows ? strip.cols() : strip.rows()).only_if(strip.has(run));
#pragma unroll 1
      for (int i = 0; i < kRun; ++i) {
        if (inside.has(i)) errors.add(Strip::value(copy.words, run, i), sums);
      }
    }
  }

  // Sums of a thread's rows, each from left to right in its lanes; then rows are folded in halves.
  TE_DIST_INLINE void fold(float (&rows)[kRuns][2], float (&sums)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        rows[run][c] += __shfl_xor_sync(kFullWarp, rows[run][c], Strip::kSquareLanes[1]);
        rows[run][c] += __shfl_xor_sync(kFullWarp, rows[run][c], Strip::kSquareLanes[0]);
      }
      sums[c] = (rows[0][c] + rows[2][c]) + (rows[1][c] + rows[3][c]);
    }
  }
};

}  // namespace te_dist::cuda
