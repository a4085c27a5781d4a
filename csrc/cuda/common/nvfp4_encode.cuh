// NVFP4: from the values of a strip and the multipliers of its runs to codes.
#pragma once

#include "nvfp4_scale.cuh"
#include "runs.cuh"

namespace te_dist::cuda {

// Largest magnitudes of a strip's runs, with any sign. `bound`: no element times its multiplier is larger than the largest
// of these and that; 0, or infinity.
struct Largest {
  float of_runs[kRuns];
  float bound;
};

// What is not a number does not count, and is infinite afterwards.
template <class Strip>
TE_DIST_INLINE Largest find_amax(Strip& strip) {
  Largest largest{{}, 0.0f};
  float(&amax)[kRuns] = largest.of_runs;
  strip.amax_or_nan(amax);
  const float all = (fabsf(amax[0]) + fabsf(amax[1])) + (fabsf(amax[2]) + fabsf(amax[3]));
  if (__builtin_expect(!(all == all), 0)) {
    strip.amax(amax);
    strip.replace_nan();
    largest.bound = float_of(kInfinityBits);
  }
  return largest;
}

// Codes to nearest. kBelow7: every element times its multiplier is.
template <bool kBelow7, class Strip>
TE_DIST_INLINE void encode_sizes(const Strip& strip, const Scale (&scales)[kRuns], uint32_t (&codes)[kRuns][2]) {
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[run][half] = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        const float size = fabsf(strip.value(run, 8 * half + i)) * scales[run].multiplier;
        push_code(codes[run][half], round_e2m1<kBelow7>(size, i));
      }
    }
  }
}

// Codes of elements `first` and two behind it, as `round_e2m1_noisy` has them.
template <class Strip, class Noise>
TE_DIST_INLINE uint32_t encode_pair_noisy(const Strip& strip, int run, int first, float multiplier, const Noise& noise) {
  const float low = fabsf(strip.value(run, first)) * multiplier, high = fabsf(strip.value(run, first + 2)) * multiplier;
  return round_e2m1_noisy(places_in_e2m1(low, high), noise(run, first));
}

// Every second code of half a run, from number `first` on, as `round_e2m1_noisy` has them.
template <class Strip, class Noise>
TE_DIST_INLINE uint32_t encode_four_noisy(const Strip& strip, int run, int first, float multiplier, const Noise& noise) {
  const uint32_t left = encode_pair_noisy(strip, run, first, multiplier, noise);
  const uint32_t right = encode_pair_noisy(strip, run, first + 4, multiplier, noise);
  return gathered(left, right, 0x7531);
}

// The same value, once another one is there.
TE_DIST_INLINE float behind(float value, uint32_t other) {
  return float_of(gathered(bits_of(value), other, kAllOfFirst));
}

// Codes rounded stochastically, in the order of the random bytes: those of a row are one run's, else all runs'.
template <class Strip, class Noise>
TE_DIST_INLINE void encode_noisy(const Strip& strip, const Scale (&scales)[kRuns], const Noise& noise,
                                 uint32_t (&codes)[kRuns][2]) {
  constexpr bool kByRuns = Strip::kRows == kRuns;
  uint32_t last = 0;
#pragma unroll
  for (int i = 0; i < 2 * kRuns; ++i) {
    const int run = kByRuns ? i / 2 : i % kRuns, half = kByRuns ? i % 2 : i / kRuns;
    float multiplier = scales[run].multiplier;
    // Otherwise the compiler begins with all of a strip, for which there are not enough registers.
    if (i > 0) multiplier = behind(multiplier, last);
    const uint32_t even = encode_four_noisy(strip, run, 8 * half, multiplier, noise);
    const uint32_t odd = encode_four_noisy(strip, run, 8 * half + 1, multiplier, noise);
    last = codes[run][half] = (even >> 1) + (odd << 3);
  }
}

// Codes with their signs. `noise`: of a pair of a run, as `round_e2m1_noisy` takes it.
template <bool kStochastic, class Strip, class Noise>
TE_DIST_INLINE void encode(const Strip& strip, const Largest& largest, const Scale (&scales)[kRuns], const Noise& noise,
                           uint32_t (&codes)[kRuns][2]) {
  float size = largest.bound;
#pragma unroll
  for (int run = 0; run < kRuns; ++run) size = fmaxf(size, fabsf(largest.of_runs[run]) * scales[run].multiplier);
  if constexpr (kStochastic) {
    encode_noisy(strip, scales, noise, codes);
  } else if (__builtin_expect(size < 7.0f, 1)) {
    encode_sizes<true>(strip, scales, codes);
  } else {
    encode_sizes<false>(strip, scales, codes);
  }
  Signs signs[kRuns][2];
  strip.find_signs(signs);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[run][half] = signs[run][half].template joined<!kStochastic>(codes[run][half]);
    }
  }
}

// Bytes of four scales.
TE_DIST_INLINE uint32_t packed(const Scale (&scales)[kRuns]) {
  return (scales[0].code | scales[1].code << 8) | (scales[2].code | scales[3].code << 8) << 16;
}

}  // namespace te_dist::cuda
