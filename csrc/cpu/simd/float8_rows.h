// FP8 with a scale for every run of 128, rowwise only: rows are read and written from end to end.
#pragma once

#include <cstring>

#include "../../numerics/scale.h"
#include "../kernels.h"
#include "apply.h"
#include "encode.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {

constexpr int kRun = 128;
constexpr int kBatch = 32;  // runs whose scales are found together, so that no run waits for another's division
constexpr int64_t kStreamedBytes = 4 << 20;  // outputs from this size on do not stay in the cache anyway

struct RunScales {
  alignas(64) float amax[kBatch] = {};
  alignas(64) float multipliers[kBatch];
  alignas(64) float inverses[kBatch];
  bool trusted[kBatch] = {};  // see encode_row

  void find(const FloatScaleRule& rule) {
    apply(amax, kBatch, [&](int i, F32 run_amax) {
      const F32 scale = scale_from_amax(run_amax, rule);
      store(multipliers + i, scale);
      store(inverses + i, 1.0f / scale);
    });
  }
};

template <class Element, class Code, class Sink>
TE_DIST_INLINE void encode_run(const typename Element::Storage* source, float multiplier, bool trusted, bool pow2,
                               uint8_t* out) {
  if (__builtin_expect(!trusted, 0)) {
    return encode_row<Element, Code, false, Sink>(source, kRun, OneMultiplier(multiplier), out);
  }
  if constexpr (Element::interleaved) {
    if (pow2 && encode_run_by_power<Code, kRun, Sink>(source, multiplier, out)) return;
  }
  encode_row<Element, Code, true, Sink>(source, kRun, OneMultiplier(multiplier), out);
}

// Fetches the run that lies so many values `ahead` of one that is encoded: finding amaxes alone would wait for memory.
// By an address, not a pointer: it may lie beyond the matrix, where fetching does nothing.
template <class Element>
TE_DIST_INLINE void prefetch_run(const typename Element::Storage* run, int64_t ahead) {
  const auto first = reinterpret_cast<uintptr_t>(run) + size_t(ahead) * sizeof(*run);
  for (size_t i = 0; i < kRun * sizeof(*run); i += 64) __builtin_prefetch(reinterpret_cast<const void*>(first + i));
}

// A part of a row: its first element, codes and run.
template <class Element>
struct RowPart {
  const typename Element::Storage* source;
  uint8_t* out;
  int64_t row, run;
};

template <class Element, class Code, class Sink>
void quantize_batch(const QuantizeFloat8Block& op, const FloatScaleRule& rule, const RowPart<Element>& part, int runs) {
  RunScales scales;
  for (int i = 0; i < runs; ++i) {
    if (op.row.amax.data) {
      scales.amax[i] = op.row.amax.at(part.row, part.run + i);
    } else {
      scales.amax[i] = run_amax<Element, kRun>(part.source + i * kRun, &scales.trusted[i]);
    }
  }
  scales.find(rule);
  for (int i = 0; i < runs; ++i) {
    prefetch_run<Element>(part.source + i * kRun, kBatch * kRun);
    encode_run<Element, Code, Sink>(part.source + i * kRun, scales.multipliers[i], scales.trusted[i], rule.pow2,
                                    part.out + i * kRun);
    op.row.scale.at(part.row, part.run + i) = scales.inverses[i];
  }
}

// A run of which the matrix covers `count` elements only.
template <class Element, class Code>
void quantize_partial_run(const QuantizeFloat8Block& op, const FloatScaleRule& rule, const RowPart<Element>& part,
                          int count) {
  typename Element::Storage padded[kRun] = {};
  uint8_t codes[kRun];
  std::memcpy(padded, part.source, sizeof(padded[0]) * size_t(count));
  quantize_batch<Element, Code, Cached>(op, rule, {padded, codes, part.row, part.run}, 1);
  std::memcpy(part.out, codes, size_t(count));
}

template <class Element, class Code, class Sink>
void quantize_row(const QuantizeFloat8Block& op, const FloatScaleRule& rule, int64_t row) {
  const int64_t start = row * op.x.cols, phase = op.phase.col % kRun;
  RowPart<Element> part{static_cast<const typename Element::Storage*>(op.x.data) + start, op.row.data + start, row, 0};
  int64_t left = op.x.cols;
  const auto advance = [&](int64_t elements, int64_t runs) {
    part.source += elements;
    part.out += elements;
    part.run += runs;
    left -= elements;
  };
  if (phase) {
    const int64_t count = left < kRun - phase ? left : kRun - phase;
    quantize_partial_run<Element, Code>(op, rule, part, int(count));
    advance(count, 1);
  }
  while (left >= kRun) {
    const int runs = int(left / kRun < kBatch ? left / kRun : kBatch);
    quantize_batch<Element, Code, Sink>(op, rule, part, runs);
    advance(runs * kRun, runs);
  }
  if (left) quantize_partial_run<Element, Code>(op, rule, part, int(left));
}

// Whether codes may be written past the caches: every run starts at a whole vector, and there are many.
static inline bool may_stream(const QuantizeFloat8Block& op) {
  return reinterpret_cast<uintptr_t>(op.row.data) % kVectorBytes == 0 && op.x.cols % kVectorBytes == 0 &&
         op.phase.col % kVectorBytes == 0 && op.x.rows * op.x.cols >= kStreamedBytes;
}

template <class Element, class Code>
void quantize_rows(const QuantizeFloat8Block& op, const FloatScaleRule& rule, int threads) {
  const bool streamed = may_stream(op);
  parallel_for(op.x.rows, threads, [&](int64_t row) {
    if (streamed) {
      quantize_row<Element, Code, Streamed>(op, rule, row);
    } else {
      quantize_row<Element, Code, Cached>(op, rule, row);
    }
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
