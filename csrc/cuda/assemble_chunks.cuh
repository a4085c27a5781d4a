// Puts together a matrix, or several, of which every rank has a chunk along one dimension.
#pragma once

#include "common/memory.cuh"

namespace te_dist::cuda {

// The dimension that is cut: chunk i has rows i * length to (i + 1) * length of extent. One value belongs to `grain` of
// them, and the first row lies `phase` inside of its grain. Chunks that share a value have the same one.
struct Chunking {
  uint32_t phase;
  uint32_t extent;
  uint32_t length;
  uint32_t grain;

  // Of the chunk that has the first row of a value.
  TE_DIST_DEVICE uint32_t chunk_of(uint32_t value) const {
    const uint32_t row = value * grain;
    return row > phase ? (row - phase) / length : 0;
  }

  TE_DIST_DEVICE uint32_t first_value(uint32_t chunk) const { return (phase + chunk * length) / grain; }

  TE_DIST_DEVICE uint32_t num_values(uint32_t chunk) const {
    const uint32_t stop = extent - chunk * length > length ? (chunk + 1) * length : extent;
    return (phase + stop + grain - 1) / grain - first_value(chunk);
  }
};

// kWidth: bytes that can be copied at a time; kDim: what is cut, members (0), lines of each (1), or values of a line (2).
// A block of threads copies a tile of one member; what it reads of a chunk lies together, so that it comes once from
// memory where a chunk has a few bytes of a line.
template <int kWidth, int kDim>
struct AssembleChunks {
  static constexpr int kThreads = 256, kBlocks = 4;
  static constexpr int kLines = 32, kPieces = 32;  // of a tile
  static constexpr int kStep = kThreads / kPieces, kCopies = kLines / kStep;

  struct Params {
    const char* gathered;
    int64_t chunk_bytes;  // from one chunk to the next
    char* out;
    int64_t member_stride;  // bytes
    int64_t line_stride;    // bytes
    int64_t lines;          // of a member
    int64_t line_bytes;
    int64_t value_bytes;  // where values of a line are cut
    Chunking cut;
  };

  TE_DIST_INLINE void run(const Params& p) {
    const int64_t pieces = p.line_bytes / kWidth, across = (pieces + kPieces - 1) / kPieces;
    const int64_t down = blockIdx.x / across;
    const int64_t piece = (blockIdx.x - down * across) * kPieces + threadIdx.x % kPieces;
    if (piece >= pieces) return;
    const int64_t member = blockIdx.y, byte = piece * kWidth;
    uint32_t words[kCopies][4];
    char* target = p.out + member * p.member_stride + byte;
    int64_t line = down * kLines + threadIdx.x / kPieces;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t at = line + i * kStep;
      if (at < p.lines) load_words<kWidth>(source(p, member, at, byte), words[i]);
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t at = line + i * kStep;
      if (at < p.lines) store_words<kWidth>(target + at * p.line_stride, words[i]);
    }
  }

  TE_DIST_INLINE const char* source(const Params& p, int64_t member, int64_t line, int64_t byte) {
    const uint32_t place = uint32_t(kDim == 0 ? member : kDim == 1 ? line : byte / p.value_bytes);
    const uint32_t chunk = p.cut.chunk_of(place), first = p.cut.first_value(chunk);
    const char* found = p.gathered + chunk * p.chunk_bytes;
    if (kDim == 0) return found + ((member - first) * p.lines + line) * p.line_bytes + byte;
    const int64_t count = p.cut.num_values(chunk);
    if (kDim == 1) return found + (member * count + line - first) * p.line_bytes + byte;
    return found + (member * p.lines + line) * count * p.value_bytes + byte - first * p.value_bytes;
  }
};

}  // namespace te_dist::cuda
