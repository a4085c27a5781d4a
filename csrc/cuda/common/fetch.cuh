// One operand of a product on its way from global to shared memory: codes are read ahead, and decoded into rows that
// tensor cores read.
#pragma once

#include "decode.cuh"
#include "memory.cuh"

namespace te_dist::cuda {

constexpr int kDecoders = 128;  // threads that fetch and decode

// An operand, `kept` x summed. `scales`: bytes for one kept and some summed values, or fp32 for `tile` kept and 128 summed
// ones. `factor`: fp32, for every kept value or (stride 0) for all, times a constant; null for the constant alone.
struct OperandView {
  const char* codes;
  int64_t pitch;  // bytes from line to line
  int64_t kept;
  const void* scales;
  int64_t scale_kept, scale_summed;  // strides
  int64_t tile, phase;               // kept values of an fp32 scale, and where in one the matrix begins
  const float* factor;
  int64_t factor_stride;
  double constant;

  TE_DIST_DEVICE float factor_of(int64_t index) const {
    return float(constant) * (factor ? __ldg(factor + index * factor_stride) : 1.0f);
  }
};

// One thread's part of an operand's tile, kKept x kStep: chunks of 16 codes along a line, read one step ahead.
template <class S, HalfType kType, int kKept, int kDistance>
struct Fetcher {
  using Decode = Decoder<typename S::Code, S::kScaling, kType>;
  static constexpr bool kTurned = S::kTurned;
  static constexpr bool kScaled = S::kScaling != Scaling::kNone;
  static constexpr int kChunks = kKept * kStep / kChunk / kDecoders;
  static constexpr int kBlocks = kKept / 64;
  static constexpr int kLines = kTurned ? 8 : kDecoders / 4;  // from a chunk to the next
  static constexpr int kGroup = kTurned ? 32 / kLines : 1;    // chunks that share scales
  static constexpr int kScaleWords = kTurned ? kChunk / 4 : 1;
  static constexpr int kBytes = kChunk * Decode::kBits / 8;
  static constexpr int kLoad = S::kLoad < kBytes ? S::kLoad : kBytes;

  const OperandView& view;
  const int length, shift;  // summed values, and the position of the first where scales begin at 0
  int line, column;         // of the first chunk, in the tile
  uint32_t target;          // of the first chunk, in the buffer
  const char* codes;        // of the next step
  const uint8_t* scales;
  int position;
  Inside kept;     // of a turned line's chunk
  int lines_left;  // of lines that are not turned

  // What is read for a step.
  struct Read {
    uint32_t codes[kChunks][kBytes / 4];
    uint32_t scales[kChunks / kGroup][kScaleWords];
  };

  TE_DIST_DEVICE Fetcher(const OperandView& operand, int summed, int first, int thread)
      : view(operand), length(summed), shift(first) {
    const int lane = thread % 32, warp = thread / 32;
    if constexpr (kTurned) {
      line = warp / kBlocks * kBlocks * 16 + lane / 4;
      column = warp % kBlocks * 64 + lane % 4 * kChunk;
      target = uint32_t(warp % kBlocks * 8192 + place_of(line, kDistance) * 128);
    } else {
      line = thread / 4;
      column = lane % 4 * kChunk;
      target = uint32_t(line * 128);
    }
  }

  TE_DIST_INLINE int64_t bytes(int64_t values) { return values * Decode::kBits / 8; }

  // Row or column of the scales, of a position where scale tiles begin at 0.
  TE_DIST_DEVICE int block_of(int at) const { return at / S::kGrain - shift / S::kGrain; }

  // To the start of the tile whose first kept value is `first`; where there is none, nothing is read from now on.
  TE_DIST_DEVICE void seek(int64_t first, bool exists) {
    position = 0;
    const int64_t left = exists ? view.kept - first : 0;
    const int64_t first_line = kTurned ? line - shift : first + line, first_column = kTurned ? first + column : column - shift;
    codes = view.codes + first_line * view.pitch + bytes(first_column);
    if constexpr (kScaled) {
      const int64_t scaled = first + (kTurned ? column : line), block = block_of(kTurned ? line : column);
      scales = static_cast<const uint8_t*>(view.scales) + scaled * view.scale_kept + block * view.scale_summed;
    }
    if constexpr (kTurned) {
      kept = within(column, int(left < kKept ? left : kKept));
    } else {
      lines_left = int(left < kKept ? left : kKept) - line;
    }
  }

  // Of kChunk values from `first` on, those that exist.
  TE_DIST_INLINE Inside within(int first, int extent) {
    return {max(0, -first), min(kChunk, extent - first)};
  }

  TE_DIST_DEVICE void fetch_chunk(int chunk, uint32_t (&words)[kBytes / 4], uint32_t (&scale)[kScaleWords]) const {
    const int at = position - shift;
    const Inside inside = kTurned ? kept : within(at + column, length);
    const bool exists = kTurned ? unsigned(at + line + chunk * kLines) < unsigned(length) : chunk * kLines < lines_left;
    const Inside in_bytes{int(bytes(inside.begin)), int(bytes(inside.end))};
    load_run<kBytes, kLoad>(codes + chunk * kLines * view.pitch, in_bytes.only_if(exists), words);
    if constexpr (kScaled && kTurned) {
      const int block = chunk / kGroup, first = at + (line / S::kGrain + block) * S::kGrain;
      const char* from = reinterpret_cast<const char*>(scales + block * view.scale_summed);
      load_run<kChunk, kLoad>(from, kept.only_if(first + S::kGrain > 0 && first < length), scale);
    } else if constexpr (kScaled) {
      scale[0] = exists && !inside.is_empty() ? __ldg(scales + chunk * kLines * view.scale_kept) : 0;
    }
  }

  TE_DIST_DEVICE void fetch(Read& read) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) fetch_chunk(i, read.codes[i], read.scales[i / kGroup]);
  }

  TE_DIST_DEVICE void advance() {
    position += kStep;
    codes += kTurned ? kStep * view.pitch : bytes(kStep);
    if constexpr (kScaled) scales += kStep / S::kGrain * view.scale_summed;
  }

  // Whether all of it could be decoded without care.
  TE_DIST_DEVICE bool decode(const Read& read, uint32_t buffer) const {
    Watch seen;
    if constexpr (kScaled && kTurned) {
#pragma unroll
      for (int i = 0; i < kChunks; i += kGroup) {
        const auto by = Decode::of_each(read.scales[i / kGroup]);
#pragma unroll
        for (int j = i; j < i + kGroup; ++j) decode_chunk<false>(read.codes[j], by, buffer + j * kLines * 128, seen);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) decode_chunk<false>(read.codes[i], multipliers(read.scales[i]), buffer + i * kLines * 128, seen);
    }
    return !Decode::needs_care(seen);
  }

  // Reads and decodes a step of the tile, one chunk after the other.
  TE_DIST_DEVICE void decode_with_care(int64_t first, int step, uint32_t buffer) {
    seek(first, true);
    position += step * kStep;
    codes += step * (kTurned ? kStep * view.pitch : bytes(kStep));
    if constexpr (kScaled) scales += step * (kStep / S::kGrain) * view.scale_summed;
    Watch seen;
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      uint32_t words[kBytes / 4], scale[kScaleWords];
      fetch_chunk(i, words, scale);
      decode_chunk<true>(words, multipliers(scale), buffer + i * kLines * 128, seen);
    }
  }

 private:
  static constexpr int kOrder = kTurned ? 1 : kDistance;

  TE_DIST_INLINE auto multipliers(const uint32_t (&scale)[kScaleWords]) {
    if constexpr (!kScaled) {
      return Decode::unscaled();
    } else if constexpr (kTurned) {
      return Decode::of_each(scale);
    } else {
      return Decode::of_all(scale[0]);
    }
  }

  template <bool kCareful, class By>
  TE_DIST_DEVICE void decode_chunk(const uint32_t (&codes)[kBytes / 4], const By& by, uint32_t buffer, Watch& seen) const {
    uint32_t values[kPairs];
    Decode::template decode<kOrder, kCareful>(codes, by, values, seen);
    const uint32_t row = buffer + target;
    const uint32_t unit = uint32_t(column % 64 / 8), swizzle = target / 128 % 8;
    store(row + (unit ^ swizzle) * 16, values);
    store(row + ((unit + 1) ^ swizzle) * 16, values + 4);
  }

  TE_DIST_INLINE void store(uint32_t address, const uint32_t* words) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
};

}  // namespace te_dist::cuda
