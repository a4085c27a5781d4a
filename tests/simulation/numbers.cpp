// Instructions on numbers.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "elements.h"

namespace sim {

template <class Type>
void round_pair(uint32_t& word, float second, float first) {
  word = Type::code(first) | uint32_t(Type::code(second)) << 16;
}
uint16_t half_towards_zero(float value) {
  const uint16_t code = f16::code(value);
  const uint8_t bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
  return std::fabs(f16::value(bytes)) > std::fabs(value) ? uint16_t(code - 1) : code;
}
void truncate_pair(uint32_t& word, float second, float first) {
  word = half_towards_zero(first) | uint32_t(half_towards_zero(second)) << 16;
}
template <class Type>
void round_one(uint16_t& code, float value) {
  code = Type::code(value);
}

void permute(uint32_t& result, uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;
    const unsigned byte = unsigned(bytes >> (choice & 7) * 8 & 0xFF);
    result |= (choice & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
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
void widen(float& value, uint16_t code) {
  const uint8_t bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
  value = f16::value(bytes);
}
void reciprocal(float& result, float value) { result = 1.0f / value; }
void saturated_half_less_two(float& result, float value) {
  result = std::min(1.0f, std::max(0.0f, __builtin_fmaf(value, 0.5f, -2.0f)));
}
void larger_or_nan(float& result, float a, float b) {
  result = is_nan(a) || is_nan(b) ? from_bits(0x7FFFFFFF) : std::max(a, b);
}
void larger_magnitude(float& result, float a, float b) {
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
void larger_integers(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) { return std::max(uint16_t(a >> 16 * i), uint16_t(b >> 16 * i)); });
}
template <class Type>
void multiply_pair(uint32_t& result, uint32_t a, uint32_t b) {
  result = by_halves([&](int i) { return Type::code(half_of<Type>(a, i) * half_of<Type>(b, i)); });
}

template void round_one<bf16>(uint16_t&, float);
template void round_pair<bf16>(uint32_t&, float, float);
template void larger_pair<bf16>(uint32_t&, uint32_t, uint32_t);
template void larger_magnitudes<bf16>(uint32_t&, uint32_t, uint32_t);
template void multiply_pair<bf16>(uint32_t&, uint32_t, uint32_t);
template void round_one<f16>(uint16_t&, float);
template void round_pair<f16>(uint32_t&, float, float);
template void larger_pair<f16>(uint32_t&, uint32_t, uint32_t);
template void larger_magnitudes<f16>(uint32_t&, uint32_t, uint32_t);
template void multiply_pair<f16>(uint32_t&, uint32_t, uint32_t);
template void encode_pair<e4m3>(uint16_t&, float, float);
template void decode_pair<e4m3>(uint32_t&, uint16_t);
template void encode_pair<e5m2>(uint16_t&, float, float);
template void decode_pair<e5m2>(uint32_t&, uint16_t);

}  // namespace sim

static float towards_zero(double exact) {
  const float nearest = float(exact);
  return std::fabs(double(nearest)) > std::fabs(exact) ? std::nextafterf(nearest, 0.0f) : nearest;
}
float __fadd_rz(float a, float b) { return towards_zero(double(a) + b); }
float __fmaf_rz(float a, float b, float c) { return towards_zero(double(a) * b + c); }
unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned most) {
  return sim::by_halves([&](int i) {
    const uint16_t sum = uint16_t((a >> 16 * i) + (b >> 16 * i));
    return std::min(sum, uint16_t(most >> 16 * i));
  });
}
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  unsigned result;
  sim::permute(result, low, high, selector);
  return result;
}
