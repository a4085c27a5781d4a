// CUDA's built-in names and PTX instructions, for threads that take turns.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "threads.h"

namespace sim {

[[noreturn]] inline void unknown(const char* instruction) {
  std::fprintf(stderr, "the simulation does not know %s\n", instruction);
  std::abort();
}

template <class... Any>
inline void nothing(Any&&...) {}

inline uint8_t* dynamic_shared() { return self->block->memory + kFirstAddress; }
inline uint32_t address_of(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - self->block->memory) | self->block->rank << kRankShift;
}
inline uint8_t* at(Block& block, uint32_t address) { return block.memory + (address & ((1u << kRankShift) - 1)); }
inline Block& block_of(uint32_t address) { return *self->block->cluster->blocks[address >> kRankShift]; }
inline uint8_t* at(uint32_t address) { return at(block_of(address), address); }

// Warps.

template <class T>
T exchange(T value, unsigned from) {
  Warp& own = warp();
  std::memcpy(&own.values[self->lane()], &value, sizeof value);
  own.meeting.wait(32);
  T found;
  std::memcpy(&found, &own.values[from % 32], sizeof found);
  own.meeting.wait(32);
  return found;
}

inline void elect(unsigned& is_elected) { is_elected = self->lane() == 0; }

inline unsigned ballot(bool value) {
  Warp& own = warp();
  own.values[self->lane()] = value;
  own.meeting.wait(32);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= unsigned(own.values[lane]) << lane;
  own.meeting.wait(32);
  return bits;
}

inline void sync_named(int barrier, int threads) { self->block->named[size_t(barrier)].wait(unsigned(threads)); }
inline void arrive_named(int barrier, int threads) { self->block->named[size_t(barrier)].arrive(unsigned(threads)); }
inline void sync_cluster() {
  Cluster& cluster = *self->block->cluster;
  cluster.meeting.wait(unsigned(cluster.blocks.size()) * self->block->threads);
}
inline void cluster_rank(uint32_t& rank) { rank = self->block->rank; }

// Barriers in shared memory: 64 bits of them.

struct BarrierWord {
  uint64_t phase : 1, pending : 15, arrivals : 15, unused : 1;
  int64_t bytes : 32;
};
static_assert(sizeof(BarrierWord) == 8);

template <class Change>
void change(Block& block, uint32_t address, const Change& change) {
  uint8_t* place = at(block, address);
  auto* word = reinterpret_cast<BarrierWord*>(place);
  change(*word);
  if (word->pending == 0 && word->bytes == 0) {
    word->phase ^= 1, word->pending = word->arrivals;
    turns->wake(block.cluster->at_barriers[place]);
  }
}

inline void barrier_init(uint32_t address, int arrivals) {
  BarrierWord word{};
  word.pending = word.arrivals = unsigned(arrivals);
  std::memcpy(at(address), &word, sizeof word);
}
inline void arrive(Block& block, uint32_t address, uint32_t bytes = 0) {
  change(block, address, [=](BarrierWord& word) {
    if (word.pending == 0) unknown("an arrival too many");
    word.bytes += bytes, --word.pending;
  });
  turns->yield();
}
inline void barrier_arrive(uint32_t address) { arrive(block_of(address), address); }
inline void barrier_arrive_at(uint32_t address, uint32_t block) { arrive(*self->block->cluster->blocks[block], address); }
inline void barrier_expect(uint32_t address, uint32_t bytes) { arrive(block_of(address), address, bytes); }
inline void barrier_wait(uint32_t address, uint32_t parity) {
  const auto* word = reinterpret_cast<BarrierWord*>(at(address));
  Waiting& there = block_of(address).cluster->at_barriers[at(address)];
  while (word->phase == parity) turns->wait(there, "a barrier at", address);
}

// The bulk copy engine takes any of its jobs next, when it likes.

// What build.py puts in the place of an encoded tensor map.
struct Map {
  char* data;
  int64_t element_bytes, rows, cols, pitch, box_rows, box_cols, swizzle;
  int64_t box_bytes() const { return box_rows * box_cols * element_bytes; }
};

// Of 0, 32, 64 or 128 bytes, for `mode` from 0 to 3.
inline uint32_t swizzled(uint32_t address, int mode = 3) { return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4); }

// Walks over the elements of a box: in shared memory, in global memory (null outside of the matrix).
template <class Visit>
void over_box(const Map& map, uint32_t address, int x, int y, uint8_t* shared, const Visit& visit) {
  const uint32_t first = address & ((1u << kRankShift) - 1);
  for (int64_t r = 0; r < map.box_rows; ++r) {
    for (int64_t c = 0; c < map.box_cols; ++c) {
      const uint32_t place = first + uint32_t((r * map.box_cols + c) * map.element_bytes);
      const bool is_inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.cols;
      visit(shared + swizzled(place, int(map.swizzle)),
            is_inside ? map.data + (y + r) * map.pitch + (x + c) * map.element_bytes : nullptr);
    }
  }
}

inline void load(const Map& map, Block* block, uint32_t target, uint32_t barrier, int x, int y) {
  turns->later([=] {
    over_box(map, target, x, y, block->memory, [&](uint8_t* shared, const char* global) {
      if (global) std::memcpy(shared, global, size_t(map.element_bytes));
      else std::memset(shared, 0, size_t(map.element_bytes));
    });
    change(*block, barrier, [&](BarrierWord& word) { word.bytes -= map.box_bytes(); });
  });
}

inline void check_box(const Map& map, uint32_t address, int x) {
  const uint32_t alignment = map.swizzle ? 1024 : 128;
  if (address % alignment) unknown("a box at an address that is not aligned");
  if (x * map.element_bytes % 16) unknown("a box that begins between two times 16 bytes");
}

template <class TensorMap>
void copy_box(uint32_t target, const TensorMap* map, uint32_t barrier, int x, int y) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, target, x);
  load(its, self->block, target, barrier, x, y);
}

template <class TensorMap>
void copy_box_to_many(uint32_t target, const TensorMap* map, uint32_t barrier, int x, int y, uint16_t blocks) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, target, x);
  for (auto& block : self->block->cluster->blocks) {
    if (blocks >> block->rank & 1) load(its, block.get(), target, barrier, x, y);
  }
}

template <bool kAdds, class TensorMap>
void store_box(const TensorMap* map, uint32_t source, int x, int y) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, source, x);
  Block* block = self->block;
  self->open_stores.push_back([=] {
    over_box(its, source, x, y, block->memory, [&](const uint8_t* shared, char* global) {
      if (!global) return;
      if constexpr (kAdds) {
        float sum, value;
        std::memcpy(&sum, global, 4), std::memcpy(&value, shared, 4);
        sum += value;
        std::memcpy(global, &sum, 4);
      } else {
        std::memcpy(global, shared, size_t(its.element_bytes));
      }
    });
  });
}

inline void commit(Work& open, std::vector<Work>& committed) {
  committed.push_back(std::move(open));
  open.clear();
}
inline void finish(std::vector<Work>& committed, size_t pending) {
  while (committed.size() > pending) {
    for (auto& work : committed.front()) work();
    committed.erase(committed.begin());
  }
}

inline void commit_stores() { commit(self->open_stores, self->stores); }
inline void wait_stores(int pending) { finish(self->stores, size_t(pending)); }
inline void wait_all_stores() { wait_stores(0); }

// Shared memory, by address.

inline void load_pair(float& x, float& y, uint32_t address) {
  std::memcpy(&x, at(address), 4), std::memcpy(&y, at(address) + 4, 4);
}
inline void store_pair(uint32_t address, float x, float y) {
  std::memcpy(at(address), &x, 4), std::memcpy(at(address) + 4, &y, 4);
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d}, lane = self->lane();
  for (uint32_t m = 0; m < 4; ++m) {
    const uint32_t row = exchange(address, m * 8 + lane / 4);
    std::memcpy(at(row) + lane % 4 * 4, &words[m], 4);
  }
}

// Types of elements.

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
template <int kExponent, int kMantissa, bool kHasInfinity>
float decode(uint32_t code) {
  const int bias = (1 << (kExponent - 1)) - 1, top = (1 << kExponent) - 1;
  const int exponent = int(code >> kMantissa) & top;
  const int mantissa = int(code & ((1u << kMantissa) - 1));
  const float sign = code >> (kExponent + kMantissa) & 1 ? -1.0f : 1.0f;
  const bool is_special = kHasInfinity ? exponent == top : exponent == top && mantissa == (1 << kMantissa) - 1;
  if (is_special) return kHasInfinity && mantissa == 0 ? sign * HUGE_VALF : NAN;
  return sign * std::ldexp(float(exponent ? mantissa + (1 << kMantissa) : mantissa), std::max(exponent, 1) - bias - kMantissa);
}
template <int kExponent, int kMantissa, bool kHasInfinity>
float decode_byte(uint8_t code) {
  static const auto values = [] {
    std::array<float, 256> values;
    for (size_t i = 0; i < values.size(); ++i) values[i] = decode<kExponent, kMantissa, kHasInfinity>(unsigned(i));
    return values;
  }();
  return values[code];
}
struct e4m3 {
  static constexpr int kBytes = 1, kLargest = 0x7E;
  static float value(const uint8_t* place) { return decode_byte<4, 3, false>(*place); }
};
struct e5m2 {
  static constexpr int kBytes = 1, kLargest = 0x7B;
  static float value(const uint8_t* place) { return decode_byte<5, 2, true>(*place); }
};
struct bf16 {
  static constexpr int kBytes = 2;
  static float value(const uint8_t* place) { return from_bits(uint32_t(place[0] | place[1] << 8) << 16); }
  static uint16_t code(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7FFF;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
};
struct f16 {
  static constexpr int kBytes = 2;
  static float value(const uint8_t* place) { return decode<5, 10, true>(uint32_t(place[0] | place[1] << 8)); }
  static uint16_t code(float value) {
    if (value != value) return 0x7FFF;
    const _Float16 half = _Float16(value);
    uint16_t code;
    std::memcpy(&code, &half, 2);
    return code;
  }
};
template <class Type>
void round_pair(uint32_t& word, float second, float first) {
  word = Type::code(first) | uint32_t(Type::code(second)) << 16;
}
inline uint16_t half_towards_zero(float value) {
  const uint16_t code = f16::code(value);
  const uint8_t bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
  return std::fabs(f16::value(bytes)) > std::fabs(value) ? uint16_t(code - 1) : code;
}
inline void truncate_pair(uint32_t& word, float second, float first) {
  word = half_towards_zero(first) | uint32_t(half_towards_zero(second)) << 16;
}
template <class Type>
void round_one(uint16_t& code, float value) {
  code = Type::code(value);
}

inline bool is_nan(float value) { return value != value; }
inline uint32_t bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline unsigned permuted(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;
    const unsigned byte = unsigned(bytes >> (choice & 7) * 8 & 0xFF);
    result |= (choice & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline void permute(uint32_t& result, uint32_t low, uint32_t high, uint32_t selector) { result = permuted(low, high, selector); }

// The code of an FP8 type that is nearest to a value, the even one of two; what is too large becomes the largest, every
// NaN the same.
template <class Type>
uint8_t nearest(float value) {
  const uint8_t sign = uint8_t(bits(value) >> 24 & 0x80);
  if (is_nan(value)) return 0x7F;
  const uint8_t largest = Type::kLargest;
  const float magnitude = std::min(std::fabs(value), Type::value(&largest));
  uint8_t best = 0;
  float distance = HUGE_VALF;
  for (int code = 0; code <= largest; ++code) {
    const uint8_t byte = uint8_t(code);
    const float off = std::fabs(Type::value(&byte) - magnitude);
    if (off < distance || (off == distance && code % 2 == 0)) best = byte, distance = off;
  }
  return uint8_t(sign | best);
}
template <class Type>
void encode_pair(uint16_t& codes, float second, float first) {
  codes = uint16_t(nearest<Type>(first) | nearest<Type>(second) << 8);
}
template <class Type>
void decode_pair(uint32_t& halves, uint16_t codes) {
  const uint8_t bytes[2] = {uint8_t(codes), uint8_t(codes >> 8)};
  halves = f16::code(Type::value(bytes)) | uint32_t(f16::code(Type::value(bytes + 1))) << 16;
}
inline void widen(float& value, uint16_t code) {
  const uint8_t bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
  value = f16::value(bytes);
}
inline void reciprocal(float& result, float value) { result = 1.0f / value; }
inline void saturated_half_less_two(float& result, float value) {
  result = std::min(1.0f, std::max(0.0f, __builtin_fmaf(value, 0.5f, -2.0f)));
}
inline void larger_or_nan(float& result, float a, float b) { result = is_nan(a) || is_nan(b) ? from_bits(0x7FFFFFFF) : std::max(a, b); }
inline void larger_magnitude(float& result, float a, float b) {
  const uint32_t sign = (bits(a) ^ bits(b)) & 0x80000000u;
  if (is_nan(a) || is_nan(b)) result = from_bits(0x7FFFFFFF);
  else result = from_bits(bits(std::max(std::fabs(a), std::fabs(b))) | sign);
}
template <class Type>
float half_of(uint32_t word, int half) {
  const uint8_t bytes[2] = {uint8_t(word >> 16 * half), uint8_t(word >> (16 * half + 8))};
  return Type::value(bytes);
}
template <class Combine>
uint32_t by_halves(const Combine& combine) {
  return uint32_t(combine(0)) | uint32_t(combine(1)) << 16;
}
template <class Type>
void larger_pair(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) -> uint16_t {
    const float x = half_of<Type>(a, i), y = half_of<Type>(b, i);
    if (is_nan(x) && is_nan(y)) return 0x7FFF;
    return is_nan(x) || y > x ? uint16_t(b >> 16 * i) : uint16_t(a >> 16 * i);
  });
}
template <class Type>
void larger_magnitudes(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) -> uint16_t {
    const uint16_t sign = uint16_t((a ^ b) >> 16 * i & 0x8000);
    const float x = half_of<Type>(a, i), y = half_of<Type>(b, i);
    if (is_nan(x) || is_nan(y)) return 0x7FFF;
    return uint16_t((std::fabs(x) > std::fabs(y) ? a : b) >> 16 * i & 0x7FFF) | sign;
  });
}
inline void larger_integers(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) { return std::max(uint16_t(a >> 16 * i), uint16_t(b >> 16 * i)); });
}
template <class Type>
void multiply_pair(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) { return Type::code(half_of<Type>(a, i) * half_of<Type>(b, i)); });
}
inline void load_words(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t words[4];
  std::memcpy(words, at(address), 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  std::memcpy(at(address), words, 16);
}

// Tensor cores: an operand is read when somebody waits for the product.

struct Descriptor {
  uint32_t first, leading, stride;
  explicit Descriptor(uint64_t bits)
      : first(uint32_t(bits & 0x3FFF) << 4), leading(uint32_t(bits >> 16 & 0x3FFF) << 4), stride(uint32_t(bits >> 32 & 0x3FFF) << 4) {}
};

template <class Type>
float operand(const uint8_t* memory, const Descriptor& its, int kept, int summed, bool is_turned) {
  const uint32_t place =
      is_turned ? its.first + kept / 64 * its.leading + summed / 8 * its.stride + summed % 8 * 128 + kept % 64 * Type::kBytes
                : its.first + kept / 8 * its.stride + kept % 8 * 128 + summed * Type::kBytes;
  return Type::value(memory + swizzled(place));
}

// As tensor cores add FP8: what lies 13 bits behind the point of the largest term is cut off from all.
template <size_t kTerms>
double sum_of_14_bits(const std::array<double, kTerms>& terms) {
  double largest = 0.0, sum = 0.0;
  for (const double term : terms) {
    if (!std::isfinite(term)) return std::accumulate(terms.begin(), terms.end(), 0.0);
    largest = std::max(largest, std::fabs(term));
  }
  if (largest == 0.0) return 0.0;
  const int last = std::ilogb(largest) - 13;
  const double inverse = std::ldexp(1.0, -last);
  for (const double term : terms) sum += double(int64_t(term * inverse));
  return std::ldexp(sum, last);
}

template <int kWidth, class First, class Second>
void multiply_late(const std::array<float*, kWidth / 2>& sums, uint64_t a, uint64_t b, bool adds, bool turns_a, bool turns_b) {
  const uint8_t* memory = self->block->memory;
  const int row = int(self->number / 32 % 4 * 16 + self->lane() / 4), col = int(self->lane() % 4 * 2);
  self->open_products.push_back([=] {
    constexpr int kDepth = 32 / First::kBytes;
    const Descriptor left(a), right(b);
    float rows[2][kDepth];
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < kDepth; ++k) rows[h][k] = operand<First>(memory, left, row + 8 * h, k, turns_a);
    }
    for (int i = 0; i < kWidth / 2; ++i) {
      const int its_col = i / 4 * 8 + col + i % 2, half = i / 2 % 2;
      std::array<double, kDepth + 1> terms;
      for (int k = 0; k < kDepth; ++k) {
        terms[size_t(k)] = double(rows[half][k]) * operand<Second>(memory, right, its_col, k, turns_b);
      }
      terms[kDepth] = adds ? double(*sums[size_t(i)]) : 0.0;
      *sums[size_t(i)] = float(First::kBytes == 1 ? sum_of_14_bits(terms) : std::accumulate(terms.begin(), terms.end(), 0.0));
    }
  });
}

template <int kWidth, class First, class Second, size_t... kSum, class Operands>
void multiply_tied(const Operands& operands, std::index_sequence<kSum...>) {
  constexpr size_t kSums = kWidth / 2, kCount = std::tuple_size_v<Operands>;
  bool turns_a = false, turns_b = false;
  if constexpr (kCount == kSums + 5) turns_a = std::get<kSums + 3>(operands), turns_b = std::get<kSums + 4>(operands);
  multiply_late<kWidth, First, Second>({&std::get<kSum>(operands)...}, std::get<kSums>(operands), std::get<kSums + 1>(operands),
                                       std::get<kSums + 2>(operands) != 0, turns_a, turns_b);
}
template <int kWidth, class First, class Second, class... Operands>
void multiply(Operands&&... operands) {
  multiply_tied<kWidth, First, Second>(std::forward_as_tuple(operands...), std::make_index_sequence<kWidth / 2>());
}

inline void commit_products() { commit(self->open_products, self->products); }

// An instruction of the whole warp: when one thread goes on, the products of all are done.
inline void wait_products(int pending) {
  warp().meeting.wait(32);
  finish(self->products, size_t(pending));
  warp().meeting.wait(32);
}

}  // namespace sim

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void __syncthreads() { sim::sync_named(0, int(sim::self->block->threads)); }
inline void __syncwarp(unsigned = ~0u) { sim::warp().meeting.wait(32); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) { return sim::exchange(value, unsigned(lane)); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return sim::exchange(value, sim::self->lane() ^ unsigned(mask)); }
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  return sim::exchange(value, sim::self->lane() < unsigned(by) ? sim::self->lane() : sim::self->lane() - unsigned(by));
}
inline unsigned __ballot_sync(unsigned, bool value) { return sim::ballot(value); }
template <class T>
T __ldg(const T* place) { return *place; }
template <class T>
T __ldcg(const T* place) { return *place; }
template <class T>
T __ldcs(const T* place) { return *place; }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline uint32_t __cvta_generic_to_shared(const void* pointer) { return sim::address_of(pointer); }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { return sim::from_bits(bits); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float value) { return __builtin_sqrtf(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) { return sim::permuted(low, high, selector); }
inline float towards_zero(double exact) {
  const float nearest = float(exact);
  return std::fabs(double(nearest)) > std::fabs(exact) ? std::nextafterf(nearest, 0.0f) : nearest;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rz(float a, float b) { return towards_zero(double(a) + b); }
inline float __fmaf_rz(float a, float b, float c) { return towards_zero(double(a) * b + c); }
inline double __dsqrt_rn(double value) { return __builtin_sqrt(value); }
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return sim::exchange(value, sim::self->lane() + unsigned(by) > 31 ? sim::self->lane() : sim::self->lane() + unsigned(by));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  unsigned largest = 0;
  for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, sim::exchange(value, unsigned(lane)));
  return largest;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline int __vimin3_s32(int a, int b, int c) { return std::min(a, std::min(b, c)); }
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned most) {
  return sim::by_halves([&](int i) { return std::min(uint16_t((a >> 16 * i) + (b >> 16 * i)), uint16_t(most >> 16 * i)); });
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
template <class T>
T atomicMax(T* place, T value) {
  T found = __atomic_load_n(place, __ATOMIC_SEQ_CST);
  while (found < value && !__atomic_compare_exchange_n(place, &found, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return found;
}
using std::max;
using std::min;
