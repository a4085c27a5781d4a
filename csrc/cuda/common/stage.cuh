// One operand of a product on its way through shared memory: codes as they lie in memory, and then values in rows that
// tensor cores read.
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

TE_DIST_INLINE void write_shared(uint32_t address, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Of S, for tiles of kKept x kStep, of which 128 threads decode each a part. Lines of codes that are summed over lie in
// the swizzle of their length, others as they are.
template <class S, HalfType kType, int kKept, int kDistance>
struct Stage {
  using Decode = Decoder<typename S::Code, S::kScaling, kType>;
  static constexpr bool kTurned = S::kTurned;
  static constexpr int kBits = Decode::kBits;
  static constexpr int kLineBytes = kTurned ? kKept : kStep * kBits / 8;
  static constexpr uint32_t kCodeBytes = kKept * kStep * kBits / 8;
  static_assert(kBits == 8 || !kTurned, "two codes share a byte along the summed dimension");

  // What a thread decodes: runs of codes under the same words of scales. A row of the tile; or, of a turned operand, 16
  // columns of every eighth of 32 lines.
  static constexpr int kRuns = kKept / 128;
  static constexpr int kScaleWords = kTurned ? 4 : 1;
  using Scales = uint32_t[kRuns][kScaleWords];

  // Where a thread begins: in codes, in values, and in scales.
  uint32_t source, target;
  int line, column;

  TE_DIST_DEVICE explicit Stage(int thread) {
    if constexpr (kTurned) {
      constexpr int kBlocks = kKept / 64;
      const int lane = thread % 32, warp = thread / 32;
      line = warp / kBlocks * 32, column = warp % kBlocks * 64 + lane % 4 * kChunk;
      const int first = line + lane / 4, row = place_of(first, kDistance);
      source = uint32_t(first * kKept + column);
      target = uint32_t(warp % kBlocks * 8192 + row * 128 + ((lane % 4 * 2) ^ (row % 8)) * 16);
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
      copy_box(map, full, codes, position * kBits / 8, kept);
    }
  }

  TE_DIST_DEVICE void load_scales(const ScaleView& view, int kept, int position, Scales& scales) const {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int its_line = kTurned ? (position + line) / S::kGrain + i : kept + line + i * 128;
      const int word = kTurned ? (kept + column) / 4 : position / (4 * S::kGrain);
#pragma unroll
      for (int j = 0; j < kScaleWords; ++j) scales[i][j] = view.word(its_line, word + j);
    }
  }

  TE_DIST_DEVICE void decode(uint32_t codes, const Scales& scales, int position, uint32_t buffer) const {
    if (decode_all(codes + source, scales, position, buffer + target)) return;
    decode_with_care(codes + source, scales, position, buffer + target);
  }

 private:
  static constexpr int kReads = kTurned ? 4 : kLineBytes / 16;  // of a run

  // Of read number `index` of a run, from its first on.
  TE_DIST_INLINE uint32_t place_of_read(uint32_t first, int index) {
    return kTurned ? first + index * 8 * kKept : first ^ index * 16;
  }

  // Whether it could be done without care. All codes are read before the first value is written: the compiler may not
  // change the order of accesses.
  TE_DIST_INLINE bool decode_all(uint32_t codes, const Scales& scales, int position, uint32_t target) {
    uint32_t words[kRuns][kReads][4];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
#pragma unroll
      for (int j = 0; j < kReads; ++j) read_shared(place_of_read(codes + i * kRunBytes, j), words[i][j]);
    }
    Watch seen;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const auto by = multipliers(scales[i], position);
#pragma unroll
      for (int j = 0; j < kReads; ++j) decode_read<false>(words[i][j], by, j, target + i * kRunValues, seen);
    }
    return !Decode::needs_care(seen);
  }

  TE_DIST_INLINE void decode_with_care(uint32_t codes, const Scales& scales, int position, uint32_t target) {
    Watch seen;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const auto by = multipliers(scales[i], position);
#pragma unroll 1
      for (int j = 0; j < kReads; ++j) {
        uint32_t words[4];
        read_shared(place_of_read(codes + i * kRunBytes, j), words);
        decode_read<true>(words, by, j, target + i * kRunValues, seen);
      }
    }
  }

  static constexpr uint32_t kRunBytes = kTurned ? 32 * kKept : 128 * kLineBytes;     // from a run's codes to the next's
  static constexpr uint32_t kRunValues = kTurned ? 32 * 128 : 128 * 128;

  // Of a run: for each column; or scale bytes of a row, the first in the lowest byte.
  TE_DIST_INLINE auto multipliers(const uint32_t (&scales)[kScaleWords], int position) {
    if constexpr (kTurned) {
      return Decode::of_each(scales);
    } else {
      return scales[0] >> position / S::kGrain % 4 * 8;
    }
  }

  // 16 codes of a line; or 16 bytes of a row, number `index`.
  template <bool kCareful, class By>
  TE_DIST_INLINE void decode_read(const uint32_t (&words)[4], const By& by, int index, uint32_t target, Watch& seen) {
    if constexpr (kTurned) {
      decode_chunk<1, kCareful>(words, by, target + index * 1024, seen);
    } else if constexpr (kBits == 8) {
      decode_chunk<kDistance, kCareful>(words, Decode::of_all(by >> index / 2 * 8 & 0xFF), target ^ index * 32, seen);
    } else {
      const uint32_t first[2] = {words[0], words[1]}, second[2] = {words[2], words[3]};
      const uint32_t scales = by >> index * 16;
      decode_chunk<kDistance, kCareful>(first, Decode::of_all(scales & 0xFF), target ^ index * 64, seen);
      decode_chunk<kDistance, kCareful>(second, Decode::of_all(scales >> 8 & 0xFF), target ^ (index * 64 + 32), seen);
    }
  }

  template <int kOrder, bool kCareful, int kWords, class By>
  TE_DIST_INLINE void decode_chunk(const uint32_t (&codes)[kWords], const By& by, uint32_t target, Watch& seen) {
    uint32_t values[kPairs];
    Decode::template decode<kOrder, kCareful>(codes, by, values, seen);
    write_shared(target, values);
    write_shared(target ^ 16, values + 4);
  }
};

}  // namespace te_dist::cuda
