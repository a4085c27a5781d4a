// From sums in registers to memory: biases, factors of rows, rounding, and the way through shared memory.
#pragma once

#include "memory.cuh"
#include "pipeline.cuh"

namespace te_dist::cuda {

// Types of a bias.
enum class BiasType { kNone, kFloat32, kBFloat16, kFloat16 };

// What a warpgroup does with `kWaves` times 64 x `kCols` sums, which lie in its registers as wgmma.cuh says.
// kGroups: warpgroups that do; of each wave they have 64 rows one after the other.
// Params: those of the kernel, which name the output, the bias (groups, cols) and the factors of rows.
// kBoxesInTurn: boxes of 64 rows of 128 bytes that it puts into shared memory at a time.
// kAdds: adds to what is there, which is read while the product is computed: into shared memory where that holds all of it,
// or else into the L2 cache, where the copy engine adds.
template <class Params, class Out, int kGroups, int kWaves, int kCols, int kBoxesInTurn, bool kAdds>
struct Epilogue {
  static constexpr int kSums = kCols / 2;  // of a wave, by thread
  static constexpr int kBoxBytes = 64 * 128, kBoxCols = 128 / Out::kBytes;
  static constexpr int kBoxes = kWaves * kCols / kBoxCols, kTurns = kBoxes / kBoxesInTurn, kParts = kTurns > 1 ? 2 : 1;
  static constexpr bool kHolds = kAdds && kTurns == kParts;
  static_assert(!kHolds || kWaves == 1, "the sums of several waves are fetched one after the other");
  static constexpr bool kFindsAnew = kAdds && kWaves > 1;  // where these need all registers
  using Buffer = uint8_t[kParts][kBoxesInTurn * kBoxBytes];
  using Sums = float[kWaves][kSums];

  const Params& p;
  Buffer& buffer;
  Barrier* held;  // of kHolds: what is added to is there
  int group;      // which warpgroup
  int row, col;   // of the first value of this thread inside the tile of a wave
  uint32_t held_parity;

  TE_DIST_DEVICE int wave_row(int wave) const { return (wave * kGroups + group) * 64; }

  // Whether the copy engine can write 64 rows of a tile. It leaves out what lies behind a matrix; a box that begins in front
  // of one is no instruction to it.
  template <class Tile>
  TE_DIST_DEVICE bool is_written(const Tile& t, int its_row) const {
    return (p.has_map != 0) & (t.col >= 0) & (its_row + 64 <= t.out_end);
  }

  // Whether it can read and write all of this warpgroup's part of the output.
  template <class Tile>
  TE_DIST_DEVICE bool is_copied(const Tile& t) const {
    return is_written(t, t.out_row + wave_row(kWaves - 1));
  }

  // Copies what the output holds to where it will be added to.
  template <class Tile>
  TE_DIST_DEVICE void fetch(const Tile& t) const {
    if (!kHolds || threadIdx.x % 128 != 0 || !is_copied(t)) return;
    wait_stores_read<0>();
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      copy_box(p.out, *held, &buffer[0][0] + box * kBoxBytes, t.col + box * kBoxCols, t.out_row + wave_row(0));
    }
    held->expect(kBoxes * kBoxBytes);
  }

  // With stage number `k` of the `stages` of a tile: brings its part of what all warpgroups will have the copy engine
  // add to into the L2 cache, with the last stages, so that it is still there. One thread does.
  template <class Tile>
  TE_DIST_INLINE void prefetch(const Params& p, const Tile& t, int k, int stages) {
    if constexpr (kAdds && !kHolds) {
      constexpr int kAcross = kCols / kBoxCols, kAll = kGroups * kBoxes;
      const int first = k - max(stages - kAll, 0);
      if (!p.has_map || first < 0 || t.col < 0) return;
#pragma unroll 1
      for (int box = first; box < kAll; box += stages) {
        prefetch_box(p.out, t.col + box % kAcross * kBoxCols, t.out_row + box / kAcross * 64);
      }
    }
  }

  template <class Element, class Tile>
  TE_DIST_DEVICE void add_bias(const Tile& t, Sums& sums) const {
    const char* bias = static_cast<const char*>(p.bias) + int64_t(t.group) * p.cols * Element::kBytes;
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int its_col = t.col + col + j / 4 * 8 + (j & 1);
      uint32_t word = 0;
      if (uint32_t(its_col) < uint32_t(p.cols)) load_words<Element::kBytes>(bias + its_col * Element::kBytes, &word);
#pragma unroll
      for (int w = 0; w < kWaves; ++w) sums[w][j] += Element::value(word, 0);
    }
  }

  template <class Tile>
  TE_DIST_DEVICE void scale_rows(const Tile& t, Sums& sums) const {
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int its_row = t.out_row + wave_row(w) + row + 8 * h;
        const float factor = its_row < t.out_end ? __ldg(p.row_factor + its_row) : 0.0f;
#pragma unroll
        for (int j = 0; j < kSums; j += 4) sums[w][j + 2 * h] *= factor, sums[w][j + 2 * h + 1] *= factor;
      }
    }
  }

  template <class Tile>
  TE_DIST_DEVICE void finish(const Tile& t, Sums& sums) const {
    const BiasType type = BiasType(p.bias_type);
    if (type == BiasType::kFloat32) add_bias<Float32>(t, sums);
    if (type == BiasType::kBFloat16) add_bias<BFloat16>(t, sums);
    if (type == BiasType::kFloat16) add_bias<Float16>(t, sums);
    if (p.row_factor) scale_rows(t, sums);
  }

  // The number of this thread; of kFindsAnew for each tile, or else what is found by it is found once for all tiles, and held
  // in registers while products are computed.
  TE_DIST_INLINE uint32_t thread_anew() {
    uint32_t thread = threadIdx.x;
    if constexpr (kFindsAnew) asm volatile("" : "+r"(thread));
    return thread;
  }

  // Where this thread puts the first of its values into a box whose rows of 128 bytes lie in the 128-byte swizzle: 16
  // bytes, number c of a row, change places with number c ^ (row % 8).
  TE_DIST_DEVICE uint32_t first_in_box() const {
    const uint32_t thread = thread_anew();
    const int lane = thread % 32, first_row = thread / 32 % 4 * 16;
    if constexpr (Out::kBytes == 2) {
      const int its_row = first_row + lane % 16;
      return its_row * 128 + ((lane / 16) ^ (its_row & 7)) * 16;
    } else {
      const int its_row = kFindsAnew ? first_row + lane / 4 : row;
      return its_row * 128 + ((lane % 4 / 2) ^ (its_row & 7)) * 16 + lane % 2 * 8;
    }
  }

  // Puts the values of a wave from column `first` on into a box at `target` in shared memory. kIsAdded: to what is there.
  template <bool kIsAdded>
  TE_DIST_DEVICE void put_box(const float (&sums)[kSums], int first, uint32_t target) const {
    const uint32_t at = target + first_in_box();
#pragma unroll
    for (int j = 0; j < kBoxCols / 8; j += Out::kBytes == 2 ? 2 : 1) {
      const float* v = &sums[(first / 8 + j) * 4];
      if constexpr (Out::kBytes == 2) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ (j * 16)),
                     "r"(Out::store_pair(v[0], v[1])), "r"(Out::store_pair(v[2], v[3])),
                     "r"(Out::store_pair(v[4], v[5])), "r"(Out::store_pair(v[6], v[7]))
                     : "memory");
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t place = (at ^ (j * 32)) + h * 1024;
          float2 value = make_float2(v[2 * h], v[2 * h + 1]);
          if constexpr (kIsAdded) {
            const float2 held = load_shared_pair(place);
            value.x += held.x, value.y += held.y;
          }
          store_shared_pair(place, value);
        }
      }
    }
  }

  // A box in shared memory to memory, but for what is not inside: each warp its 16 rows, 8 threads 128 bytes of a row.
  TE_DIST_DEVICE void write_rows(int first_row, int first_col, int out_end, const uint8_t* box) const {
    const uint32_t thread = thread_anew();
    const int lane = thread % 32, chunk = lane % 8, its_col = first_col + chunk * 16 / Out::kBytes;
    const Inside cols = Inside::of(its_col, 16 / Out::kBytes, p.cols).scaled(Out::kBytes);
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int in_box = thread / 32 % 4 * 16 + i + lane / 8, its_row = first_row + in_box;
      const uint4 v = *reinterpret_cast<const uint4*>(box + in_box * 128 + (chunk ^ (in_box & 7)) * 16);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      char* target = static_cast<char*>(p.out_data) + (its_row * p.out_stride + its_col) * Out::kBytes;
      const Inside inside = cols.only_if(its_row < out_end);
      if constexpr (kAdds) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (inside.has(4 * c)) reinterpret_cast<float*>(target)[c] += float_of(words[c]);
        }
      } else if (p.has_map && inside.begin == 0 && inside.end == 16) {  // addresses of rows are multiples of 16
        store_words<16>(target, words);
      } else {
        store_run<16, Out::kBytes>(target, inside, words);
      }
    }
  }

  // By way of shared memory, in turns, of which each fills one part of it while the other may still be read: by the copy
  // engine, while the next tile is computed; by threads what it cannot write, or where rows behind are others'.
  template <bool kIsAdded, class Tile>
  TE_DIST_DEVICE void write_turns(const Tile& t, const Sums& sums) const {
    // What the turn before has stored may still be read; where turns are odd in number, the first has its part from the last.
    constexpr int kMayBeRead = (kParts - 1) * kBoxesInTurn, kAtFirst = kTurns % kParts ? 0 : kMayBeRead;
    const bool is_first = threadIdx.x % 128 == 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      uint8_t* part = buffer[turn % kParts];
      if constexpr (!kIsAdded) {
        if (is_first) turn ? wait_stores_read<kMayBeRead>() : wait_stores_read<kAtFirst>();
        sync_threads(1 + group, 128);
      }
#pragma unroll
      for (int i = 0; i < kBoxesInTurn; ++i) {
        const int first = (turn * kBoxesInTurn + i) * kBoxCols;
        put_box<kIsAdded>(sums[first / kCols], first % kCols, shared_address(part + i * kBoxBytes));
      }
      fence_shared_for_async();
      sync_threads(1 + group, 128);
#pragma unroll
      for (int i = 0; i < kBoxesInTurn; ++i) {
        const int first = (turn * kBoxesInTurn + i) * kBoxCols;
        const int its_row = t.out_row + wave_row(first / kCols), its_col = t.col + first % kCols;
        const uint8_t* box = part + i * kBoxBytes;
        if (kIsAdded || is_written(t, its_row)) {
          if (is_first) store_box<kAdds && !kHolds>(p.out, shared_address(box), its_col, its_row);
        } else {
          write_rows(its_row, its_col, t.out_end, box);
          if (is_first) skip_store();
        }
      }
    }
  }

  template <class Tile>
  TE_DIST_DEVICE void write(const Tile& t, const Sums& sums) {
    if (kHolds && is_copied(t)) {
      held->wait(held_parity);
      held_parity ^= 1;
      write_turns<kHolds>(t, sums);
    } else {
      write_turns<false>(t, sums);
      if constexpr (kHolds) {  // the copy engine will write where threads have read
        fence_shared_for_async();
        sync_threads(1 + group, 128);
      }
    }
  }
};

}  // namespace te_dist::cuda
