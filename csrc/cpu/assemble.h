// Copies rectangles into their places of a larger matrix.
#pragma once

#include <algorithm>
#include <vector>

#include "types.h"

namespace te_dist::cpu {

struct Rectangle {
  const char* data;
  int64_t row_stride;  // bytes
  int64_t rows;
  int64_t row_bytes;
  int64_t row, col_bytes;  // where it goes
};

struct Assemble {
  std::vector<Rectangle> parts;
  char* out;
  int64_t out_stride;  // bytes
};

void copy_parts(const Assemble& op, int threads);

// A dimension that is cut: chunk i has rows i * length to (i + 1) * length of extent. One value belongs to `grain` of
// them, and the first row lies `phase` inside of its grain.
struct Chunking {
  int64_t phase, extent, length, grain;

  int64_t num_chunks() const { return extent ? (extent + length - 1) / length : 0; }
  int64_t begin(int64_t chunk) const { return (phase + chunk * length) / grain; }
  int64_t end(int64_t chunk) const {
    return (phase + std::min((chunk + 1) * length, extent) + grain - 1) / grain;
  }
};

}  // namespace te_dist::cpu
