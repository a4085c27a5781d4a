// CUDA's built-in names and PTX instructions, for threads that take turns: all that kernels need, in few words, since
// every kernel is compiled with it. What has no template is in simulator.cpp, compiled once.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;

#define __CUDACC_RTC__ 1
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __constant__
#define __shared__ SIM_SHARED  // what build.py makes static
#define __align__(bytes)

namespace sim {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Launch {
  void (*kernel)(const void*);
  const void* parameters;
  Index grid;
  unsigned cluster, threads;  // blocks of a cluster, threads of a block
};
// One cluster after the other.
void run(const Launch& launch);

[[noreturn]] void unknown(const char* instruction);

template <class... Any>
inline void nothing(Any&&...) {}

uint8_t* dynamic_shared();
uint32_t address_of(const void* pointer);

// Warps.

unsigned lane();
unsigned block_threads();
void sync_warp();
unsigned long long exchange_bits(unsigned long long bits, unsigned from);
unsigned ballot(bool value);
void elect(unsigned& is_elected);

template <class T>
T exchange(T value, unsigned from) {
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = exchange_bits(bits, from);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Barriers.

void sync_named(int barrier, int threads);
void sync_cluster();
void cluster_rank(uint32_t& rank);
void barrier_init(uint32_t address, int arrivals);
void barrier_arrive(uint32_t address);
void barrier_arrive_at(uint32_t address, uint32_t block);
void barrier_expect(uint32_t address, uint32_t bytes);
void barrier_wait(uint32_t address, uint32_t parity);

// Copies.

void copy_box(uint32_t target, const void* map, uint32_t barrier, int x, int y);
void copy_box_to_many(uint32_t target, const void* map, uint32_t barrier, int x, int y, uint16_t blocks);
template <bool kAdds>
void store_box(const void* map, uint32_t source, int x, int y);
void commit_stores();
void wait_stores(int pending);

void load_pair(float& x, float& y, uint32_t address);
void store_pair(uint32_t address, float x, float y);
void load_word(uint16_t& word, uint32_t address);
void load_word(uint32_t& word, uint32_t address);
void load_words(uint32_t& a, uint32_t& b, uint32_t address);
void load_words(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address);
void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void load_turned_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address);

// Tensor cores.

// Of an instruction: a sum it adds to, a register that it reads, or a number.
union Operand {
  Operand(float& sum) : sum(&sum) {}
  Operand(uint32_t& word) : word(&word) {}
  Operand(unsigned long long number) : number(number) {}

  float* sum;
  const uint32_t* word;
  unsigned long long number;
};

// Sums as many as a thread has of a product `width` wide; behind them descriptors of both sides, whether it adds and,
// if that is asked, which sides are turned. The first side may be four registers instead, which are not turned.
template <class First, class Second>
void multiply_late(int width, const Operand* operands, int count);

template <int kWidth, class First, class Second, class... Operands>
void multiply(Operands&&... operands) {
  const Operand all[] = {operands...};
  multiply_late<First, Second>(kWidth, all, sizeof...(operands));
}
void commit_products();
void wait_products(int pending);

// Types of elements.

struct e4m3;
struct e5m2;
struct bf16;
struct f16;

template <class Type>
void round_one(uint16_t& code, float value);
template <class Type>
void round_pair(uint32_t& word, float second, float first);
template <class Type>
void encode_pair(uint16_t& codes, float second, float first);
template <class Type>
void decode_pair(uint32_t& halves, uint16_t codes);
template <class Type>
void larger_pair(uint32_t& result, uint32_t a, uint32_t b);
template <class Type>
void larger_magnitudes(uint32_t& result, uint32_t a, uint32_t b);
template <class Type>
void multiply_pair(uint32_t& result, uint32_t a, uint32_t b);
void truncate_pair(uint32_t& word, float second, float first);
void widen(float& value, uint16_t code);
void reciprocal(float& result, float value);
void saturated_half_less_two(float& result, float value);
void larger_or_nan(float& result, float a, float b);
void larger_magnitude(float& result, float a, float b);
void larger_integers(uint32_t& result, uint32_t a, uint32_t b);
void permute(uint32_t& result, uint32_t low, uint32_t high, uint32_t selector);

}  // namespace sim

extern sim::Index threadIdx, blockIdx, gridDim, blockDim;

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

inline void __syncthreads() { sim::sync_named(0, int(sim::block_threads())); }
inline void __syncwarp(unsigned = ~0u) { sim::sync_warp(); }
inline unsigned __ballot_sync(unsigned, bool value) { return sim::ballot(value); }
inline bool __any_sync(unsigned, bool value) { return sim::ballot(value) != 0; }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return sim::exchange(value, unsigned(lane));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return sim::exchange(value, sim::lane() ^ unsigned(mask));
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  return sim::exchange(value, sim::lane() < unsigned(by) ? sim::lane() : sim::lane() - unsigned(by));
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return sim::exchange(value, sim::lane() + unsigned(by) > 31 ? sim::lane() : sim::lane() + unsigned(by));
}
unsigned __reduce_max_sync(unsigned, unsigned value);
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) same |= unsigned(sim::exchange(value, lane) == value) << lane;
  return same;
}

template <class T>
T __ldg(const T* place) {
  return *place;
}
template <class T>
T __ldcg(const T* place) {
  return *place;
}
template <class T>
T __ldcs(const T* place) {
  return *place;
}
template <class T>
T atomicAdd(T* place, T value) {
  T found = *place;  // nobody else has a turn meanwhile
  *place = found + value;
  return found;
}
template <class T>
T atomicMax(T* place, T value) {
  T found = *place;  // nobody else has a turn meanwhile
  if (found < value) *place = value;
  return found;
}

template <class T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
extern "C" {
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float value) { return __builtin_sqrtf(value); }
inline double __dsqrt_rn(double value) { return __builtin_sqrt(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
float __fadd_rz(float a, float b);
float __fmaf_rz(float a, float b, float c);

inline uint32_t __cvta_generic_to_shared(const void* pointer) { return sim::address_of(pointer); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline int __vimin3_s32(int a, int b, int c) { return min(a, min(b, c)); }
unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned most);
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector);
