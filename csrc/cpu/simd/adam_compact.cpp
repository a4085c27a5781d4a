// One step of Adam over many tensors whose state is kept in fewer bytes, a block of a row at a time.
#include <cstring>

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

template <class Values, class Make>
void fill(int count, Values* values, const Make& make) {
  for (int i = 0; i < count; ++i) values[i] = make(i);
}

void load_all(const Matrix& from, const Block& block, float* values) {
  const auto* halves = static_cast<const uint16_t*>(from.data) + block.first;
  if (from.dtype == DType::kBFloat16) {
    fill(block.count, values, [=](int i) { return decode_bfloat16(uint32_t(halves[i])); });
  } else if (from.dtype == DType::kFloat16) {
    fill(block.count, values, [=](int i) { return Half::decode(uint32_t(halves[i])); });
  } else {
    std::memcpy(values, static_cast<const float*>(from.data) + block.first, size_t(block.count) * sizeof(float));
  }
}

// To nearest even.
void store_all(const Matrix& to, const Block& block, const float* values) {
  auto* halves = static_cast<uint16_t*>(to.data) + block.first;
  if (to.dtype == DType::kBFloat16) {
    fill(block.count, halves, [=](int i) { return uint16_t(encode_bfloat16(values[i])); });
  } else if (to.dtype == DType::kFloat16) {
    fill(block.count, halves, [=](int i) { return uint16_t(Half::encode(values[i])); });
  } else {
    std::memcpy(static_cast<float*>(to.data) + block.first, values, size_t(block.count) * sizeof(float));
  }
}

void load_values(const CompactTensor& t, const Block& block, float* values) {
  const auto *high = static_cast<const uint16_t*>(t.value.data) + block.first, *low = t.remainder + block.first;
  if (t.keep == Keep::kRemainder) {
    fill(block.count, values, [=](int i) { return join_float(high[i], low[i]); });
  } else {
    load_all(t.value, block, values);
  }
}

void store_values(const CompactTensor& t, const Block& block, const float* values, const uint32_t* words) {
  auto *high = static_cast<uint16_t*>(t.value.data) + block.first, *low = t.remainder + block.first;
  if (t.keep == Keep::kRemainder) {
    fill(block.count, high, [=](int i) { return uint16_t(split_float(values[i]).high); });
    fill(block.count, low, [=](int i) { return uint16_t(split_float(values[i]).low); });
  } else if (t.keep == Keep::kStochastic) {
    fill(block.count, high, [=](int i) { return uint16_t(encode_bfloat16_stochastic(values[i], value_noise(words[i]))); });
  } else {
    store_all(t.value, block, values);
  }
  if (t.copy.data) store_all(t.copy, block, values);
}

// kRoot: bytes hold the roots of the values.
template <bool kRoot>
void load_moments(const Matrix& from, const float* scales, const Block& block, float* values) {
  if (from.dtype != DType::kByte) return load_all(from, block, values);
  const auto* codes = static_cast<const uint8_t*>(from.data) + block.first;
  const float scale = scales[block.number];
  fill(block.count, values, [=](int i) {
    const float value = E4M3::decode(uint32_t(codes[i])) * scale;
    return kRoot ? value * value : value;
  });
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
    store_all(to, block, values);
  }
}

constexpr int kQuads = 16;  // drawn together

// philox_rounds, word by word: compilers make vectors of this.
void draw_quads(const CompactTensor& t, uint64_t first, uint32_t* out) {
  alignas(64) uint32_t c[4][kQuads];
  for (int i = 0; i < kQuads; ++i) {
    const PhiloxBlock counter = adam_counter(t.noise, t.step, first + uint64_t(i));
    for (int w = 0; w < 4; ++w) c[w][i] = counter.words[w];
  }
  uint32_t k0 = uint32_t(t.noise.seed), k1 = uint32_t(t.noise.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < kQuads; ++i) {
      const uint64_t product0 = kPhiloxMultiplier0 * c[0][i], product1 = kPhiloxMultiplier1 * c[2][i];
      c[0][i] = uint32_t(product1 >> 32) ^ c[1][i] ^ k0;
      c[2][i] = uint32_t(product0 >> 32) ^ c[3][i] ^ k1;
      c[1][i] = uint32_t(product1), c[3][i] = uint32_t(product0);
    }
    k0 += kPhiloxKey0, k1 += kPhiloxKey1;
  }
  for (int i = 0; i < kQuads; ++i) {
    for (int w = 0; w < 4; ++w) out[4 * i + w] = c[w][i];
  }
}

// Random words of a block. Those of elements that lie one behind the other in the whole are drawn many at a time.
void draw(const CompactTensor& t, const Block& block, uint32_t* words) {
  const uint64_t begin = place_in_whole(t.noise, uint64_t(block.first));
  const uint64_t end = place_in_whole(t.noise, uint64_t(block.first + block.count - 1));
  if (end - begin == uint64_t(block.count - 1)) {
    uint32_t whole[kMomentBlock + 4 * (kQuads + 1)];
    const int quads = int(end / 4 - begin / 4) + 1;
    for (int first = 0; first < quads; first += kQuads) {
      draw_quads(t, begin / 4 + uint64_t(first), whole + 4 * first);
    }
    std::memcpy(words, whole + begin % 4, size_t(block.count) * sizeof *words);
    return;
  }
  PhiloxBlock drawn{};
  uint64_t quad = ~uint64_t(0);
  for (int i = 0; i < block.count; ++i) {
    const uint64_t place = place_in_whole(t.noise, uint64_t(block.first + i));
    if (place / 4 != quad) quad = place / 4, drawn = adam_noise(t.noise, t.step, quad);
    words[i] = drawn.words[place % 4];
  }
}

void update(const AdamFactors& factors, const CompactTensor& t, const Block& block) {
  // What lies behind the block is computed on, and not kept.
  alignas(64) float values[kMomentBlock] = {}, first[kMomentBlock] = {}, second[kMomentBlock] = {}, grad[kMomentBlock] = {};
  uint32_t words[kMomentBlock] = {};
  load_values(t, block, values);
  load_moments<false>(t.exp_avg, t.exp_avg_scale, block, first);
  load_moments<true>(t.exp_avg_sq, t.exp_avg_sq_scale, block, second);
  load_all(t.grad, block, grad);
  if (t.keep == Keep::kStochastic || t.exp_avg.dtype != DType::kFloat32 || t.exp_avg_sq.dtype != DType::kFloat32) {
    draw(t, block, words);
  }
  for (int i = 0; i < kMomentBlock; i += kLanes) {
    AdamState<F32> state{load<F32>(values + i), load<F32>(first + i), load<F32>(second + i)};
    adam_update(factors, load<F32>(grad + i), state);
    store(values + i, state.value), store(first + i, state.exp_avg), store(second + i, state.exp_avg_sq);
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
