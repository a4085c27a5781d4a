// Copies rectangles into their places of a larger matrix.
#pragma once

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

}  // namespace te_dist::cpu
