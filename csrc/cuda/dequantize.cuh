// Codes times scales: one fp32 product for each element, rounded once to the output type.
#pragma once

#include "common/codes.cuh"
#include "common/patch.cuh"

namespace te_dist::cuda {

// How codes lie in memory: along rows, along columns, or anyhow; two in a byte along rows or columns.
enum class Order { kRows, kColumns, kAny, kPairsInRows, kPairsInColumns };

struct FloatScales {
  using Stored = float;
  struct Extra {};
  TE_DIST_INLINE float value(const Extra&, float stored, int64_t) { return stored; }
};

struct PowerScales {
  using Stored = uint8_t;
  struct Extra {};
  TE_DIST_INLINE float value(const Extra&, uint8_t stored, int64_t) { return e8m0_value(uint32_t(stored)); }
};

struct NvFp4Scales {
  using Stored = uint8_t;
  struct Extra {
    Plane<const float> amax;  // row stride 0: one for the tensor
    int64_t e4m3_max;
  };
  TE_DIST_INLINE float value(const Extra& extra, uint8_t stored, int64_t row) {
    return nvfp4_decode_scale(uint32_t(stored), extra.amax.at(row, 0), int(extra.e4m3_max));
  }
};

// kLoad: bytes of codes that can be read at a time, up to 8 (4 for pairs); kStore: bytes that can be written, up to 16.
template <class Element, class Code, class Scales, Order kOrder, int kLoad, int kStore>
struct Dequantize {
  static constexpr int kThreads = kPanelThreads;
  static constexpr int kBlocks = kLoad >= 4 && kStore >= 8 ? 3 : 2;
  static constexpr bool kPairs = kOrder == Order::kPairsInRows || kOrder == Order::kPairsInColumns;
  static constexpr bool kTurned = kOrder == Order::kColumns || kOrder == Order::kPairsInColumns;
  static constexpr int kBits = kPairs ? 4 : 8;
  static constexpr int kRunBytes = kPatch * kBits / 8;
  static constexpr int kWords = kRunBytes / 4;

  struct Params {
    void* out;
    Extents extents;
    Plane<const uint8_t> data;  // for pairs the strides are bytes between rows, or columns, of the logical matrix
    Plane<const typename Scales::Stored> scale;
    Extents tile;
    Phase phase;
    typename Scales::Extra extra;
  };

  const Params& p;
  const Place place;

  TE_DIST_INLINE uint32_t code(const uint32_t (&words)[kWords], int i) {
    return words[i * kBits / 32] >> (i * kBits % 32) & ((1u << kBits) - 1);
  }

  // Codes of a row of the patch, or of a column where they lie along columns.
  TE_DIST_DEVICE void load(int i, uint32_t (&words)[kWords]) const {
    if constexpr (kOrder == Order::kAny) {
      words[0] = words[1] = 0;
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        if (!place.rows.has(i) || !place.cols.has(j)) continue;
        words[j / 4] |= uint32_t(p.data.at(place.row + i, place.col + j)) << (8 * (j % 4));
      }
    } else {
      const int64_t line = kTurned ? place.col + i : place.row + i;
      const int64_t position = (kTurned ? place.row : place.col) * kBits / 8;
      const int64_t stride = kTurned ? p.data.col_stride : p.data.row_stride;
      const Inside& along = kTurned ? place.rows : place.cols;
      const bool is_inside = kTurned ? place.cols.has(i) : place.rows.has(i);
      const Inside bytes{along.begin * kBits / 8, along.end * kBits / 8};
      const char* first = reinterpret_cast<const char*>(p.data.data) + line * stride + position;
      load_run<kRunBytes, kLoad>(first, bytes.only_if(is_inside), words);
    }
  }

  // Tiles along a dimension of a patch: divided once, then counted.
  struct Tiles {
    int64_t index, left;  // left: elements of it from here on

    TE_DIST_DEVICE void advance(int64_t extent) {
      if (--left > 0) return;
      ++index;
      left = extent;
    }
  };

  TE_DIST_DEVICE float scale(const Tiles& tile, int64_t tile_col, int i) const {
    return Scales::value(p.extra, p.scale.at(tile.index, tile_col), place.row + i);
  }

  TE_DIST_DEVICE void write_row(int i, const float (&values)[kPatch], const float (&scales)[kPatch]) const {
    uint32_t words[kPatch / Element::kPerWord];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const uint32_t stored = Element::store(values[j] * scales[j]);
      const int w = j / Element::kPerWord;
      words[w] = j % Element::kPerWord ? words[w] | stored << 16 : stored;
    }
    char* first = static_cast<char*>(p.out) + ((place.row + i) * place.extents.cols + place.col) * Element::kBytes;
    store_run<kPatch * Element::kBytes, kStore>(first, place.cols.scaled(Element::kBytes).only_if(place.rows.has(i)), words);
  }

  TE_DIST_DEVICE void dequantize() const {
    uint32_t lines[kPatch][kWords];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) load(i, lines[i]);
    if (place.cols.is_empty()) return;
    const int64_t first_col = p.phase.col + place.col, first_row = p.phase.row + place.row;
    const int64_t tile_col = first_col / p.tile.cols;
    int tile_of_col[kPatch];  // counted from the first
    Tiles cols{0, p.tile.cols - first_col % p.tile.cols};
#pragma unroll
    for (int j = 0; j < kPatch; ++j, cols.advance(p.tile.cols)) tile_of_col[j] = int(cols.index);
    Tiles tile{first_row / p.tile.rows, p.tile.rows - first_row % p.tile.rows};
#pragma unroll
    for (int i = 0; i < kPatch; ++i, tile.advance(p.tile.rows)) {
      if (!place.rows.has(i)) continue;
      float values[kPatch], scales[kPatch];
      if (tile_of_col[kPatch - 1] == 0) {
        fill(scales, scale(tile, tile_col, i));
      } else {
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
          scales[j] = place.cols.has(j) ? scale(tile, tile_col + tile_of_col[j], i) : 0.0f;
        }
      }
      decode(lines, i, values);
      write_row(i, values, scales);
    }
  }

  // Values of row `i` of the patch.
  TE_DIST_INLINE void decode(const uint32_t (&lines)[kPatch][kWords], int i, float (&values)[kPatch]) {
#pragma unroll
    for (int j = 0; j < kPatch; j += 2) {
      const uint32_t first = kTurned ? code(lines[j], i) : code(lines[i], j);
      const uint32_t second = kTurned ? code(lines[j + 1], i) : code(lines[i], j + 1);
      if constexpr (kPairs) {
        values[j] = Code::decode(first), values[j + 1] = Code::decode(second);
      } else {
        const float2 both = decode_pair<Code>(first | second << 8);
        values[j] = both.x, values[j + 1] = both.y;
      }
    }
  }

  TE_DIST_INLINE void run(const Params& p) {
    Dequantize{p, Place::of(p.extents, {0, 0}, blockIdx.x)}.dequantize();
  }
};

}  // namespace te_dist::cuda
