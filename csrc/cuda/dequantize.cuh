// Codes times scales: one fp32 product for each element, rounded once to the output type.
#pragma once

#include "common/codes.cuh"
#include "common/patch.cuh"

namespace te_dist::cuda {

// How codes lie in memory: along rows, along columns, or anyhow; two in a byte along rows or columns.
enum class Order { kRows, kColumns, kAny, kPairsInRows, kPairsInColumns };

// How scales are stored, what is read for one of them, and its value. Reading comes apart, so that all that a patch needs
// can be under way at a time. differs_by_row: whether rows of one tile have scales of their own.

struct FloatScales {
  using Stored = float;
  using Read = float;
  struct Extra {};
  TE_DIST_INLINE bool differs_by_row(const Extra&) { return false; }
  TE_DIST_INLINE Read read(const Extra&, const float& stored, int64_t) { return __ldg(&stored); }
  TE_DIST_INLINE float value(const Extra&, Read read) { return read; }
};

struct PowerScales {
  using Stored = uint8_t;
  using Read = uint32_t;
  struct Extra {};
  TE_DIST_INLINE bool differs_by_row(const Extra&) { return false; }
  TE_DIST_INLINE Read read(const Extra&, const uint8_t& stored, int64_t) { return __ldg(&stored); }
  TE_DIST_INLINE float value(const Extra&, Read read) { return e8m0_value(read); }
};

struct NvFp4Scales {
  using Stored = uint8_t;
  struct Read {
    uint32_t code;
    float amax;
  };
  struct Extra {
    Plane<const float> amax;  // row stride 0: one for the tensor
    int64_t e4m3_max;
  };
  TE_DIST_INLINE bool differs_by_row(const Extra& extra) { return extra.amax.row_stride != 0; }
  TE_DIST_INLINE Read read(const Extra& extra, const uint8_t& stored, int64_t row) {
    return {__ldg(&stored), __ldg(&extra.amax.at(row, 0))};
  }
  TE_DIST_INLINE float value(const Extra& extra, const Read& read) {
    return nvfp4_decode_scale(read.code, read.amax, int(extra.e4m3_max));
  }
};

// kLoad: bytes of codes that can be read at a time, up to 8 (4 for pairs); kStore: bytes that can be written, up to 16.
template <class Element, class Code, class Scales, Order kOrder, int kLoad, int kStore>
struct Dequantize {
  static constexpr int kThreads = kPanelThreads;
  static constexpr bool kPairs = kOrder == Order::kPairsInRows || kOrder == Order::kPairsInColumns;
  static constexpr int kBlocks = !kPairs && kLoad >= 4 && kStore >= 8 ? 3 : 2;
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
    int64_t first;
    int of[kPatch];  // tile of each element, counted from the first

    TE_DIST_INLINE Tiles along(int64_t position, int64_t tile_extent) {
      Tiles tiles{position / tile_extent};
      const int64_t end = (tiles.first + 1) * tile_extent - position;
      const int extent = int(tile_extent < kPatch ? tile_extent : kPatch);  // no patch has an end farther off
      int tile = 0, left = int(end < kPatch ? end : kPatch);
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        tiles.of[i] = tile;
        if (--left > 0) continue;
        ++tile;
        left = extent;
      }
      return tiles;
    }
  };

  // Of a tile that has element (i, j) of the patch.
  TE_DIST_DEVICE void read_scale(int64_t tile_row, int64_t tile_col, int i, int j, typename Scales::Read& read) const {
    if (place.rows.has(i) && place.cols.has(j)) {
      read = Scales::read(p.extra, p.scale.at(tile_row, tile_col), place.row + i);
    }
  }

  // Codes of a row of the patch.
  struct Codes {
    uint32_t of[kPatch];
  };

  TE_DIST_DEVICE void write_row(int i, const Codes& codes, const float (&scales)[kPatch]) const {
    float values[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; j += 2) {
      if constexpr (kPairs) {
        values[j] = Code::decode(codes.of[j]), values[j + 1] = Code::decode(codes.of[j + 1]);
      } else {
        const float2 both = decode_pair<Code>(codes.of[j] | codes.of[j + 1] << 8);
        values[j] = both.x, values[j + 1] = both.y;
      }
    }
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

  // Scales of the rows where columns share them, of the columns where rows do; a patch that tiles cut both ways is read
  // anew, row by row.
  TE_DIST_DEVICE void dequantize() const {
    uint32_t lines[kPatch][kWords];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) load(i, lines[i]);
    const Tiles rows = Tiles::along(p.phase.row + place.row, p.tile.rows);
    const Tiles cols = Tiles::along(p.phase.col + place.col, p.tile.cols);
    typename Scales::Read read[kPatch] = {};
    float scales[kPatch];
    if (cols.of[kPatch - 1] == 0) {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) read_scale(rows.first + rows.of[i], cols.first, i, 0, read[i]);
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        fill(scales, Scales::value(p.extra, read[i]));
        write_row(i, row_of(lines, i), scales);
      }
    } else if (rows.of[kPatch - 1] == 0 && !Scales::differs_by_row(p.extra)) {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) read_scale(rows.first, cols.first + cols.of[j], 0, j, read[j]);
#pragma unroll
      for (int j = 0; j < kPatch; ++j) scales[j] = Scales::value(p.extra, read[j]);
#pragma unroll
      for (int i = 0; i < kPatch; ++i) write_row(i, row_of(lines, i), scales);
    } else {
#pragma unroll 1
      for (int i = 0; i < kPatch; ++i) {
        const int64_t tile_row = (p.phase.row + place.row + i) / p.tile.rows;
#pragma unroll
        for (int j = 0; j < kPatch; ++j) read_scale(tile_row, cols.first + cols.of[j], i, j, read[j]);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) scales[j] = Scales::value(p.extra, read[j]);
        write_row(i, row_at(i), scales);
      }
    }
  }

  TE_DIST_INLINE Codes row_of(const uint32_t (&lines)[kPatch][kWords], int i) {
    Codes codes;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) codes.of[j] = kTurned ? code(lines[j], i) : code(lines[i], j);
    return codes;
  }

  TE_DIST_DEVICE Codes row_at(int i) const {
    const int64_t row = place.row + i;
    Codes codes = {};
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      if (!place.rows.has(i) || !place.cols.has(j)) continue;
      const int64_t along = kTurned ? row : place.col + j;
      const uint8_t* first = &p.data.at(row, place.col + j);
      codes.of[j] = kPairs ? first[along / 2] >> (along % 2 * 4) & 15u : *first;
    }
    return codes;
  }

  TE_DIST_INLINE void run(const Params& p) {
    // A warp holds 16 rows and all columns of a panel; of codes along columns 32 rows and half of the columns.
    const int row = kTurned ? threadIdx.x / 64 * 32 + threadIdx.x % 4 * kPatch : SquareLanes::row(threadIdx.x);
    const int col = kTurned ? threadIdx.x / 4 % 16 * kPatch : SquareLanes::col(threadIdx.x);
    Place place = Place::of(p.extents, {0, 0}, blockIdx.x, row, col);
    place.rows.begin = place.cols.begin = 0;  // without a phase
    Dequantize{p, place}.dequantize();
  }
};

}  // namespace te_dist::cuda
