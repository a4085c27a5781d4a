// One step of Adam over many tensors whose state is kept in fewer bytes, a block of a row at a time.
#include "elements.h"
#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

constexpr int64_t kBlocksAtATime = 64;  // of a thread

// A block: `count` values from `first` on, in a row.
struct Block {
  int64_t first;
  int64_t number;  // among those of its tensor
  int count;
};

float load_one(const Matrix& from, int64_t index) {
  if (from.dtype == DType::kBFloat16) return decode_bfloat16(uint32_t(static_cast<const uint16_t*>(from.data)[index]));
  if (from.dtype == DType::kFloat16) return Half::decode(uint32_t(static_cast<const uint16_t*>(from.data)[index]));
  return static_cast<const float*>(from.data)[index];
}

// To nearest even.
void store_one(const Matrix& to, int64_t index, float value) {
  if (to.dtype == DType::kBFloat16) {
    static_cast<uint16_t*>(to.data)[index] = uint16_t(encode_bfloat16(value));
  } else if (to.dtype == DType::kFloat16) {
    static_cast<uint16_t*>(to.data)[index] = uint16_t(Half::encode(value));
  } else {
    static_cast<float*>(to.data)[index] = value;
  }
}

void load_values(const CompactTensor& t, const Block& block, float* values) {
  const auto* high = static_cast<const uint16_t*>(t.value.data) + block.first;
  for (int i = 0; i < block.count; ++i) {
    values[i] = t.keep == Keep::kRemainder ? join_float(high[i], t.remainder[block.first + i])
                                           : load_one(t.value, block.first + i);
  }
}

void store_values(const CompactTensor& t, const Block& block, const float* values, const uint32_t* words) {
  auto* high = static_cast<uint16_t*>(t.value.data) + block.first;
  for (int i = 0; i < block.count; ++i) {
    if (t.keep == Keep::kRemainder) {
      const SplitFloat split = split_float(values[i]);
      high[i] = uint16_t(split.high), t.remainder[block.first + i] = uint16_t(split.low);
    } else if (t.keep == Keep::kStochastic) {
      high[i] = uint16_t(encode_bfloat16_stochastic(values[i], value_noise(words[i])));
    } else {
      store_one(t.value, block.first + i, values[i]);
    }
    if (t.copy.data) store_one(t.copy, block.first + i, values[i]);
  }
}

// kRoot: bytes hold the roots of the values.
template <bool kRoot>
void load_moments(const Matrix& from, const float* scales, const Block& block, float* values) {
  for (int i = 0; i < block.count; ++i) {
    if (from.dtype == DType::kByte) {
      const float value = E4M3::decode(uint32_t(static_cast<const uint8_t*>(from.data)[block.first + i])) * scales[block.number];
      values[i] = kRoot ? value * value : value;
    } else {
      values[i] = load_one(from, block.first + i);
    }
  }
}

template <bool kRoot>
void store_bytes(uint8_t* codes, float& scale, int count, const float* values, const uint32_t* noise) {
  float kept[kMomentBlock];
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    kept[i] = kRoot ? square_root(values[i]) : values[i];
    largest = larger(largest, magnitude_key(bits_of(kept[i])));
  }
  const MomentScale found = moment_scale(float_of(largest));
  for (int i = 0; i < count; ++i) {
    codes[i] = uint8_t(kRoot ? encode_root(kept[i], found.inverse, noise[i])
                             : encode_e4m3_stochastic(kept[i] * found.inverse, noise[i]));
  }
  scale = found.scale;
}

template <bool kRoot>
void store_moments(const Matrix& to, float* scales, const Block& block, const float* values, const uint32_t* words) {
  uint32_t noise[kMomentBlock];
  for (int i = 0; i < block.count; ++i) noise[i] = kRoot ? second_noise(words[i]) : first_noise(words[i]);
  if (to.dtype == DType::kByte) {
    store_bytes<kRoot>(static_cast<uint8_t*>(to.data) + block.first, scales[block.number], block.count, values, noise);
  } else if (to.dtype == DType::kBFloat16) {
    auto* codes = static_cast<uint16_t*>(to.data) + block.first;
    for (int i = 0; i < block.count; ++i) codes[i] = uint16_t(encode_bfloat16_stochastic(values[i], noise[i]));
  } else {
    for (int i = 0; i < block.count; ++i) static_cast<float*>(to.data)[block.first + i] = values[i];
  }
}

void draw(const CompactTensor& t, const Block& block, uint32_t* words) {
  PhiloxBlock drawn{};
  uint64_t quad = ~uint64_t(0);
  for (int i = 0; i < block.count; ++i) {
    const uint64_t place = place_in_whole(t.noise, uint64_t(block.first + i));
    if (place / 4 != quad) quad = place / 4, drawn = adam_noise(t.noise, t.step, quad);
    words[i] = drawn.words[place % 4];
  }
}

void update(const AdamFactors& factors, const CompactTensor& t, const Block& block) {
  float values[kMomentBlock], first[kMomentBlock], second[kMomentBlock];
  uint32_t words[kMomentBlock];
  load_values(t, block, values);
  load_moments<false>(t.exp_avg, t.exp_avg_scale, block, first);
  load_moments<true>(t.exp_avg_sq, t.exp_avg_sq_scale, block, second);
  draw(t, block, words);
  for (int i = 0; i < block.count; ++i) {
    AdamState<float> state{values[i], first[i], second[i]};
    adam_update(factors, load_one(t.grad, block.first + i), state);
    values[i] = state.value, first[i] = state.exp_avg, second[i] = state.exp_avg_sq;
  }
  store_values(t, block, values, words);
  store_moments<false>(t.exp_avg, t.exp_avg_scale, block, first, words);
  store_moments<true>(t.exp_avg_sq, t.exp_avg_sq_scale, block, second, words);
}

}  // namespace

void multi_adam_compact(const MultiAdamCompact& op, int threads) {
  const int64_t blocks = op.num_tensors ? op.ends[op.num_tensors - 1] : 0;
  parallel_for((blocks + kBlocksAtATime - 1) / kBlocksAtATime, threads, [&](int64_t chunk) {
    int64_t index = 0;
    const int64_t last = (chunk + 1) * kBlocksAtATime < blocks ? (chunk + 1) * kBlocksAtATime : blocks;
    for (int64_t block = chunk * kBlocksAtATime; block < last; ++block) {
      while (op.ends[index] <= block) ++index;
      const CompactTensor& t = op.tensors[index];
      const int64_t number = block - (index ? op.ends[index - 1] : 0);
      const int64_t in_row = (t.value.cols + kMomentBlock - 1) / kMomentBlock;
      const int64_t col = number % in_row * kMomentBlock, rest = t.value.cols - col;
      update(op.factors[index], t, {number / in_row * t.value.cols + col, number, int(rest < kMomentBlock ? rest : kMomentBlock)});
    }
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
