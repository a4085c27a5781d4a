// Operands of a product on their way to tensor cores: one through shared memory, codes as they lie in memory and then values
// in rows; the other from codes in shared memory to values in registers.
//
// Which 16 summed values a product takes, and in which order, is for both to agree on.
#pragma once

#include "decode.cuh"
#include "memory.cuh"
#include "pipeline.cuh"

namespace te_dist::cuda {

// Scale bytes, read by words: lines along the contiguous dimension of the codes.
struct ScaleView {
  const uint8_t* data;
  int64_t pitch;  // bytes from line to line
  int32_t lines, words;

  TE_DIST_DEVICE uint32_t word(int line, int index) const {
    if (unsigned(line) >= unsigned(lines) || unsigned(index) >= unsigned(words)) return 0;
    return __ldg(reinterpret_cast<const uint32_t*>(data + line * pitch) + index);
  }
};

TE_DIST_INLINE void read_shared(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

TE_DIST_INLINE void read_shared(uint32_t address, uint32_t (&words)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

TE_DIST_INLINE uint32_t read_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

TE_DIST_INLINE uint32_t read_shared_half(uint32_t address) {
  uint16_t half;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}

TE_DIST_INLINE void write_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// How the 64 summed values of a step are dealt out to the four products that add them. A lane holds four values of a row in
// each product: pairs `n` of 0 to 7, of four lanes `q` side by side.
// kNatural: pair n of lane q are values 8 n + 2 q and the next. Otherwise a lane has a run of 16, values 16 q to 16 q + 15,
// which become pairs in the order of kDistance.
template <bool kNatural, int kDistance>
struct Order {
  // Where summed value number `value` comes.
  TE_DIST_INLINE constexpr int place(int value) {
    if (kNatural) return value;
    const int pair_place = place_of(value % kChunk, kDistance);
    return pair_place / 2 * 8 + value / kChunk * 2 + pair_place % 2;
  }
};

// Codes of S in shared memory, kKept x kStep of them.
template <class S, HalfType kType, int kKept>
struct Codes {
  using Decode = Decoder<typename S::Code, S::kScaling, kType>;
  static constexpr bool kTurned = S::kTurned;
  static constexpr int kBits = Decode::kBits;
  static constexpr int kLineBytes = kStep * kBits / 8;  // of values that are summed over
  static constexpr int kWords = kChunk * kBits / 32;    // of a run of 16 along such a line
  static constexpr uint32_t kBytes = kKept * kLineBytes;
  static constexpr int kStepsOfWord = kTurned ? 1 : 4 * S::kGrain / kStep;  // which its scales serve
  static_assert(kBits == 8 || !kTurned, "two codes share a byte along the summed dimension");

  // Scale byte of run number `run` of a line, from a word of them. `position`: of the line's first code.
  TE_DIST_INLINE uint32_t scale_byte(uint32_t word, int position, int run) {
    return word >> (position / S::kGrain % 4 * 8 + run * kChunk / S::kGrain * 8) & 0xFF;
  }
};

// The operand whose values lie in shared memory: 128 threads decode kKept = 128 lines. Lines of codes that are summed over
// lie in the swizzle of their length, others as they are.
template <class S, HalfType kType, bool kNatural, int kDistance>
struct Stage : Codes<S, kType, 128> {
  using Base = Codes<S, kType, 128>;
  using typename Base::Decode;
  using Base::kLineBytes, Base::kTurned, Base::kWords;
  static constexpr int kKept = 128, kRuns = kStep / kChunk;
  // What a thread decodes: a row of the tile; or, of a turned operand, 16 columns of every eighth of 32 lines.
  static constexpr int kScaleWords = kTurned ? 4 : 1;
  using Scales = uint32_t[kScaleWords];

  // Where a thread begins: in codes, in values, and in scales.
  uint32_t source, target;
  int line, column;

  TE_DIST_DEVICE explicit Stage(int thread) {
    if constexpr (kTurned) {
      const int lane = thread % 32, warp = thread / 32;
      line = warp / 2 * 32, column = warp % 2 * 64 + lane % 4 * kChunk;
      const int first = line + lane / 4, row = Order<kNatural, kDistance>::place(first);
      source = uint32_t(first * kKept + column);
      target = uint32_t(warp % 2 * 8192 + row * 128 + ((lane % 4 * 2) ^ (row % 8)) * 16);
    } else {
      line = thread, column = 0;
      source = uint32_t(thread * kLineBytes + thread / (128 / kLineBytes) % (kLineBytes / 16) * 16);
      target = uint32_t(thread * 128 + thread % 8 * 16);
    }
  }

  // Reads the tile whose first kept value is `kept` and whose first summed one is `position`.
  TE_DIST_INLINE void load_codes(const TensorMap& map, Barrier& full, void* codes, int kept, int position) {
    if constexpr (kTurned) {
      copy_box(map, full, codes, kept, position);
    } else {
      copy_box(map, full, codes, position * Base::kBits / 8, kept);
    }
  }

  TE_DIST_DEVICE void load_scales(const ScaleView& view, int kept, int position, Scales& scales) const {
#pragma unroll
    for (int j = 0; j < kScaleWords; ++j) {
      scales[j] = kTurned ? view.word((position + line) / S::kGrain, (kept + column) / 4 + j)
                          : view.word(kept + line, position / (4 * S::kGrain));
    }
  }

  TE_DIST_DEVICE void decode(uint32_t codes, const Scales& scales, int position, uint32_t buffer) const {
    if (decode_all<false>(codes + source, scales, position, buffer + target)) return;
    decode_all<true>(codes + source, scales, position, buffer + target);
  }

 private:
  // Whether it could be done without care. All codes are read before the first value is written: the compiler may not
  // change the order of accesses.
  template <bool kCareful>
  TE_DIST_INLINE bool decode_all(uint32_t codes, const Scales& scales, int position, uint32_t target) {
    uint32_t words[kRuns][kWords];
    read_runs(codes, words);
    Watch seen;
    if constexpr (kTurned) {
      const auto by = Decode::of_each(scales);
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        uint32_t values[kPairs];
        Decode::template decode<1, kCareful>(words[i], by, values, seen);
        write_line(line_of(target, i), values);
      }
    } else {
      uint32_t values[kRuns][kPairs];
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const auto by = Decode::of_all(Base::scale_byte(scales[0], position, i));
        Decode::template decode<kDistance, kCareful>(words[i], by, values[i], seen);
        if constexpr (kNatural) write_line(target ^ i * 32, values[i]);
      }
      if constexpr (!kNatural) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          write_shared(target ^ n * 16, values[0][n], values[1][n], values[2][n], values[3][n]);
        }
      }
    }
    return !Decode::needs_care(seen);
  }

  // Those of a row; of a turned operand run number i is that of line number 8 i of its 32.
  TE_DIST_INLINE void read_runs(uint32_t codes, uint32_t (&words)[kRuns][kWords]) {
#pragma unroll
    for (int i = 0; i < kRuns * kWords / 4; ++i) {
      uint32_t four[4];
      read_shared(kTurned ? codes + i * 8 * kKept : codes ^ i * 16, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[(i * 4 + j) / kWords][j % kWords] = four[j];
    }
  }

  // Where the values of line number 8 * index go.
  TE_DIST_INLINE uint32_t line_of(uint32_t target, int index) {
    if (kNatural) return target + index * 1024;
    return (target ^ index / 2 * 32) + index / 2 * 256 + index % 2 * 4096;
  }

  TE_DIST_INLINE void write_line(uint32_t target, const uint32_t (&values)[kPairs]) {
    write_shared(target, values[0], values[1], values[2], values[3]);
    write_shared(target ^ 16, values[4], values[5], values[6], values[7]);
  }
};

// The operand whose values lie in registers, as multiply_by_16 takes them: 256 threads hold kWaves x 128 lines. Codes that
// are summed over lie in the swizzle of their length, others in boxes of 128 kept ones in that of 128 bytes. Words of scales
// lie in shared memory, one for each row; of a turned operand one for four columns, line after line.
template <class S, HalfType kType, int kWaves, int kDistance>
struct Fragments : Codes<S, kType, 128 * kWaves> {
  static constexpr int kKept = 128 * kWaves;
  using Base = Codes<S, kType, kKept>;
  using typename Base::Decode;
  using Base::kLineBytes, Base::kTurned, Base::kWords;
  static constexpr bool kNatural = kTurned;
  static constexpr int kBoxes = kTurned ? kWaves : 1;
  // Words of scales of a step, and of them for each of 128 threads that load.
  static constexpr int kScaleWords = kTurned ? kStep / S::kGrain * kKept / 4 : kKept;
  static constexpr int kOfThread = (kScaleWords + 127) / 128;
  using Scales = uint32_t[kOfThread];
  using Values = uint32_t[kStep / 16][4];  // of a wave

  TE_DIST_INLINE void load_codes(const TensorMap& map, Barrier& full, void* codes, int kept, int position) {
    if constexpr (kTurned) {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) copy_box(map, full, static_cast<char*>(codes) + i * 8192, kept + i * 128, position);
    } else {
      copy_box(map, full, codes, position * Base::kBits / 8, kept);
    }
  }

  TE_DIST_INLINE void load_scales(const ScaleView& view, int thread, int kept, int position, Scales& scales) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int index = thread + i * 128;
      if (index >= kScaleWords) continue;
      scales[i] = kTurned ? view.word(position / S::kGrain + index / (kKept / 4), kept / 4 + index % (kKept / 4))
                          : view.word(kept + index, position / (4 * S::kGrain));
    }
  }

  TE_DIST_INLINE void put_scales(uint32_t (&shared)[kScaleWords], int thread, const Scales& scales) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (thread + i * 128 < kScaleWords) shared[thread + i * 128] = scales[i];
    }
  }

  // Row of the tile of row number `row` of the 16 of a warp and a wave.
  TE_DIST_INLINE int row_of(int wave, int warp, int row) {
    if (kTurned) return (warp * 16 + 2 * (row % 8)) * kWaves + 2 * wave + row / 8;
    return (wave * 8 + warp) * 16 + row;
  }

  int quarter, first;  // number of four lanes side by side; first row, or column, that is held

  TE_DIST_DEVICE explicit Fragments(int thread) : quarter(thread % 4), first(row_of(0, thread / 32, thread % 32 / 4)) {}

  // Decodes what a wave multiplies. `codes`: address of them.
  TE_DIST_DEVICE void decode(uint32_t codes, const uint32_t (&scales)[kScaleWords], int position, int wave,
                             Values& values) const {
    if (decode_all<false>(codes, scales, position, wave, values)) return;
    decode_all<true>(codes, scales, position, wave, values);
  }

 private:
  template <bool kCareful>
  TE_DIST_DEVICE bool decode_all(uint32_t codes, const uint32_t (&scales)[kScaleWords], int position, int wave,
                                 Values& values) const {
    Watch seen;
    if constexpr (kTurned) {
      decode_columns<kCareful>(codes, scales, wave, values, seen);
    } else {
      decode_rows<kCareful>(codes, scales, position, wave, values, seen);
    }
    return !Decode::needs_care(seen);
  }

  template <bool kCareful>
  TE_DIST_DEVICE void decode_rows(uint32_t codes, const uint32_t (&scales)[kScaleWords], int position, int wave,
                                  Values& values, Watch& seen) const {
    constexpr int kRunBytes = kChunk * Base::kBits / 8;
    const int row = first + wave * 128;
    const uint32_t swizzle = first / (128 / kLineBytes) % (kLineBytes / 16) * 16;  // the same 8 rows further
    const uint32_t place = codes + row * kLineBytes + ((quarter * kRunBytes) ^ swizzle);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[kWords], pairs[kPairs];
      read_shared(place + h * 8 * kLineBytes, words);
      const auto by = Decode::of_all(Base::scale_byte(scales[row + 8 * h], position, quarter));
      Decode::template decode<kDistance, kCareful>(words, by, pairs, seen);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) values[n / 2][n % 2 * 2 + h] = pairs[n];
    }
  }

  // A thread holds 2 kWaves columns side by side, the low bytes of a word.
  template <bool kCareful>
  TE_DIST_DEVICE void decode_columns(uint32_t codes, const uint32_t (&scales)[kScaleWords], int wave, Values& values,
                                     Watch& seen) const {
    uint32_t by[2][2];  // of both halves of the summed values, of both columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = scales[(half * kStep / 2 / S::kGrain * kKept + first) / 4] >> first % 4 * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto its = Decode::of_all(word >> (2 * wave + h) * 8 & 0xFF);
        by[half][h] = its.words[0];
        seen.scale = max(seen.scale, its.largest);
      }
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      uint32_t lines[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) lines[e] = columns(codes, n, 2 * quarter + e);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t low = __byte_perm(lines[0], lines[1], 0x0400 + (2 * wave + h) * 0x0101);
        values[n / 2][n % 2 * 2 + h] = Decode::template decode_pair<kCareful>(low, by[n / 4][h], seen);
      }
    }
  }

  // What a thread holds of line `row` of eight, number `eight` of the step.
  TE_DIST_DEVICE uint32_t columns(uint32_t codes, int eight, int row) const {
    const uint32_t chunk = first % 128 / 16 ^ row;
    const uint32_t place = codes + first / 128 * 8192 + row * 128 + chunk * 16 + first % 16 + eight * 1024;
    return kWaves == 2 ? read_shared_word(place) : read_shared_half(place);
  }
};

}  // namespace te_dist::cuda
