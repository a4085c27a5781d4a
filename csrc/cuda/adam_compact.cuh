// Adam whose state is kept in fewer bytes than fp32: the bytes of csrc/cpu/simd/adam_compact.cpp.
//
// A launch of AdvanceSteps comes first, as for adam.cuh.
#pragma once

#include "../numerics/adam_compact.h"
#include "adam.cuh"

namespace te_dist::cuda {

// How eight values in a row are kept. kWide: addresses are multiples of 16 bytes, or of 8 for bytes.

template <class Type, bool kWide>
TE_DIST_INLINE void load_octet(const void* data, int64_t at, const Inside& inside, float (&values)[kPatch]) {
  constexpr int kBytes = kPatch * Type::kBytes;
  uint32_t words[kPatch / Type::kPerWord];
  load_once<kBytes, kWide ? 16 : Type::kBytes>(static_cast<const char*>(data) + at * Type::kBytes,
                                               inside.scaled(Type::kBytes), words);
#pragma unroll
  for (int j = 0; j < kPatch; ++j) values[j] = Type::value(words[j / Type::kPerWord], j % Type::kPerWord);
}

template <int kBytes, bool kWide>
TE_DIST_INLINE void load_codes(const void* data, int64_t at, const Inside& inside, uint32_t (&codes)[kPatch]) {
  constexpr int kAccess = kWide ? kBytes * kPatch : kBytes, kPerWord = 4 / kBytes;
  uint32_t words[kPatch / kPerWord];
  load_once<kBytes * kPatch, kAccess>(static_cast<const char*>(data) + at * kBytes, inside.scaled(kBytes), words);
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    codes[j] = words[j / kPerWord] >> (8 * kBytes * (j % kPerWord)) & (kBytes == 1 ? 0xFFu : 0xFFFFu);
  }
}

template <int kBytes, bool kWide>
TE_DIST_INLINE void store_codes(void* data, int64_t at, const Inside& inside, const uint32_t (&codes)[kPatch]) {
  constexpr int kAccess = kWide ? kBytes * kPatch : kBytes, kPerWord = 4 / kBytes;
  uint32_t words[kPatch / kPerWord] = {};
#pragma unroll
  for (int j = 0; j < kPatch; ++j) words[j / kPerWord] |= codes[j] << (8 * kBytes * (j % kPerWord));
  store_run<kBytes * kPatch, kAccess>(static_cast<char*>(data) + at * kBytes, inside.scaled(kBytes), words);
}

// Of what is updated.
template <class Type>
struct Nearest {
  static constexpr bool kDraws = false;
  template <bool kWide>
  TE_DIST_INLINE void load(const void* data, const uint16_t*, int64_t at, const Inside& inside, float (&values)[kPatch]) {
    load_octet<Type, kWide>(data, at, inside, values);
  }
  template <bool kWide>
  TE_DIST_INLINE void store(void* data, uint16_t*, int64_t at, const Inside& inside, const float (&values)[kPatch],
                            const uint32_t (&)[kPatch]) {
    store_octet<Type, kWide ? 16 : 4>(data, at, inside, values);
  }
};

// bf16, rounded by chance.
struct Stochastic {
  static constexpr bool kDraws = true;
  template <bool kWide>
  TE_DIST_INLINE void load(const void* data, const uint16_t*, int64_t at, const Inside& inside, float (&values)[kPatch]) {
    load_octet<BFloat16, kWide>(data, at, inside, values);
  }
  template <bool kWide>
  TE_DIST_INLINE void store(void* data, uint16_t*, int64_t at, const Inside& inside, const float (&values)[kPatch],
                            const uint32_t (&noise)[kPatch]) {
    uint32_t codes[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) codes[j] = encode_bfloat16_stochastic(values[j], value_noise(noise[j]));
    store_codes<2, kWide>(data, at, inside, codes);
  }
};

// bf16, and 16 bits of what is missing.
struct Remainder {
  static constexpr bool kDraws = false;
  template <bool kWide>
  TE_DIST_INLINE void load(const void* data, const uint16_t* rest, int64_t at, const Inside& inside, float (&values)[kPatch]) {
    uint32_t high[kPatch], low[kPatch];
    load_codes<2, kWide>(data, at, inside, high);
    load_codes<2, kWide>(rest, at, inside, low);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) values[j] = join_float(high[j], low[j]);
  }
  template <bool kWide>
  TE_DIST_INLINE void store(void* data, uint16_t* rest, int64_t at, const Inside& inside, const float (&values)[kPatch],
                            const uint32_t (&)[kPatch]) {
    uint32_t high[kPatch], low[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const SplitFloat split = split_float(values[j]);
      high[j] = split.high, low[j] = split.low;
    }
    store_codes<2, kWide>(data, at, inside, high);
    store_codes<2, kWide>(rest, at, inside, low);
  }
};

// Of moments. kRoot: the second one, which is kept as its root where it is kept in bytes. All lanes of a warp come here.
template <class Type>
struct Moment {
  static constexpr bool kDraws = Type::kBytes == 2;
  template <bool kWide, bool kRoot>
  TE_DIST_INLINE void load(const void* data, float, int64_t at, const Inside& inside, float (&values)[kPatch]) {
    load_octet<Type, kWide>(data, at, inside, values);
  }
  template <bool kWide, bool kRoot>
  TE_DIST_INLINE void store(void* data, float*, int64_t at, const Inside& inside, const float (&values)[kPatch],
                            const uint32_t (&noise)[kPatch]) {
    if constexpr (kDraws) {
      uint32_t codes[kPatch];
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        codes[j] = encode_bfloat16_stochastic(values[j], kRoot ? second_noise(noise[j]) : first_noise(noise[j]));
      }
      store_codes<2, kWide>(data, at, inside, codes);
    } else {
      store_octet<Type, kWide ? 16 : 4>(data, at, inside, values);
    }
  }
};

// e4m3 with a scale for each block, which 16 lanes hold.
struct MomentBytes {
  static constexpr bool kDraws = true;
  template <bool kWide, bool kRoot>
  TE_DIST_INLINE void load(const void* data, float scale, int64_t at, const Inside& inside, float (&values)[kPatch]) {
    uint32_t codes[kPatch];
    load_codes<1, kWide>(data, at, inside, codes);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const float value = E4M3::decode(codes[j]) * scale;
      values[j] = kRoot ? value * value : value;
    }
  }
  template <bool kWide, bool kRoot>
  TE_DIST_INLINE void store(void* data, float* scale, int64_t at, const Inside& inside, const float (&values)[kPatch],
                            const uint32_t (&noise)[kPatch]) {
    float kept[kPatch];
    uint32_t largest = 0, codes[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      kept[j] = kRoot ? square_root(values[j]) : values[j];
      largest = inside.has(j) ? larger(largest, magnitude_key(bits_of(kept[j]))) : largest;
    }
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) largest = larger(largest, __shfl_xor_sync(kFullWarp, largest, mask));
    const MomentScale found = moment_scale(float_of(largest));
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      codes[j] = kRoot ? encode_root(kept[j], found.inverse, second_noise(noise[j]))
                       : encode_e4m3_stochastic(kept[j] * found.inverse, first_noise(noise[j]));
    }
    store_codes<1, kWide>(data, at, inside, codes);
    if (threadIdx.x % 16 == 0 && !inside.is_empty()) *scale = found.scale;
  }
};

template <class Grad, class Value, class First, class Second, class Copy, bool kWide>
struct AdamCompact {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 2;
  static constexpr int kLanes = kMomentBlock / kPatch;  // of a block of values
  static constexpr int kRounds = 4;                     // of a block of threads
  static_assert(kLanes == 16, "half a warp shares a scale");

  struct Params {
    void* value;
    uint16_t* remainder;
    void* exp_avg;
    float* exp_avg_scale;
    void* exp_avg_sq;
    float* exp_avg_sq_scale;
    const void* const* grad;
    const AdamFactors* factors;
    const float* step;
    void* copy;
    int64_t rows;
    int64_t cols;
    AdamNoise noise;
  };

  TE_DIST_INLINE void run(const Params& p, int64_t block) {
    const int64_t in_row = (p.cols + kMomentBlock - 1) / kMomentBlock;
    for (int i = 0; i < kRounds; ++i) {
      const int64_t number = ((block * kRounds + i) * kThreads + threadIdx.x) / kLanes;
      const int64_t row = number / in_row, col = number % in_row * kMomentBlock + threadIdx.x % kLanes * kPatch;
      update(p, number, row * p.cols + col, Inside::of(col, kPatch, p.cols).only_if(row < p.rows));
    }
  }

  // Random words of eight elements.
  TE_DIST_INLINE void draw(const Params& p, int64_t at, uint32_t (&words)[kPatch]) {
    const uint32_t step = uint32_t(*p.step);
    const uint64_t place = place_in_whole(p.noise, uint64_t(at));
    if (place % 4 == 0 && place_in_whole(p.noise, uint64_t(at) + kPatch - 1) == place + kPatch - 1) {
      const PhiloxBlock low = adam_noise(p.noise, step, place / 4), high = adam_noise(p.noise, step, place / 4 + 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = low.words[j], words[4 + j] = high.words[j];
    } else {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        const uint64_t own = place_in_whole(p.noise, uint64_t(at) + j);
        const PhiloxBlock drawn = adam_noise(p.noise, step, own / 4);
        const uint32_t low = own % 4 == 0 ? drawn.words[0] : drawn.words[1];
        const uint32_t high = own % 4 == 2 ? drawn.words[2] : drawn.words[3];
        words[j] = own % 4 < 2 ? low : high;
      }
    }
  }

  TE_DIST_INLINE void update(const Params& p, int64_t number, int64_t at, const Inside& inside) {
    float values[kPatch], first[kPatch], second[kPatch], grad[kPatch];
    uint32_t words[kPatch] = {};
    const bool is_here = !inside.is_empty();
    const AdamFactors factors = *p.factors;
    Value::template load<kWide>(p.value, p.remainder, at, inside, values);
    First::template load<kWide, false>(p.exp_avg, is_here && p.exp_avg_scale ? p.exp_avg_scale[number] : 0.0f, at, inside,
                                       first);
    Second::template load<kWide, true>(p.exp_avg_sq, is_here && p.exp_avg_sq_scale ? p.exp_avg_sq_scale[number] : 0.0f, at,
                                       inside, second);
    load_octet<Grad, kWide>(*p.grad, at, inside, grad);
    if constexpr (Value::kDraws || First::kDraws || Second::kDraws) {
      if (is_here) draw(p, at, words);
    }
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      AdamState<float> state{values[j], first[j], second[j]};
      adam_update(factors, grad[j], state);
      values[j] = state.value, first[j] = state.exp_avg, second[j] = state.exp_avg_sq;
    }
    Value::template store<kWide>(p.value, p.remainder, at, inside, values, words);
    First::template store<kWide, false>(p.exp_avg, p.exp_avg_scale + number, at, inside, first, words);
    Second::template store<kWide, true>(p.exp_avg_sq, p.exp_avg_sq_scale + number, at, inside, second, words);
    if constexpr (Copy::kBytes > 0) store_octet<Copy, kWide ? 16 : 4>(p.copy, at, inside, values);
  }
};

}  // namespace te_dist::cuda
