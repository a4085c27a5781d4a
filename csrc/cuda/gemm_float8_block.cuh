// Products of FP8 matrices with fp32 scales for every 128 values that are summed over: of A for a row, of B for a row or for
// 128 rows. out (M, N) = A (M, K) B (N, K)^T, once or for groups of rows, or of what is summed over.
//
// One block of threads stays on each multiprocessor and walks over tiles of the product. Of a warpgroup of producers a warp
// finds the tiles, and a thread fills a ring of stages by the bulk copy engine; two or three warpgroups of consumers multiply.
// The tensor cores sum 128 values at a time, with 14 bits; each such sum is scaled and added in fp32. While one consumer
// does that, the others keep the tensor cores busy.
#pragma once

#include "common/epilogue.cuh"
#include "common/persistent.cuh"
#include "common/tiles.cuh"
#include "common/turn.cuh"
#include "common/wgmma.cuh"

namespace te_dist::cuda {

// Walk: which tiles there are, see common/tiles.cuh.
// kSquareB: B has a scale for 128 x 128, not for 1 x 128.
// kConsumers: how many. kWaves: 64 rows of the product that each computes one after the other, with the same part of B.
// kCluster: blocks side by side along N that read A once for all.
// kAdds: adds to what `out` holds.
// kTurnsB: B lies as (K, N), with scales of squares. Warps of the producers turn each part of it before it is multiplied.
template <template <class> class Walk, class CodeA, class CodeB, class Out, bool kSquareB, int kConsumers, int kWaves,
          int kCols, int kCluster, int kStages, bool kAdds, bool kTurnsB>
struct GemmFloat8Block {
  static constexpr int kThreads = 128 * (1 + kConsumers), kBlocks = 1;
  static constexpr int kRows = 64 * kWaves * kConsumers, kDepth = 128;  // of a tile
  static_assert(!kTurnsB || (kSquareB && kCols == 128), "what is turned is a square");
  using Tiles = Walk<TileShape<kRows, kCols, kCluster, kSquareB, kTurnsB>>;
  static constexpr int kPreparers = kTurnsB ? TileTurner::kWarps : 0;
  // Whether scales of columns, which several waves need, are held in registers. Each makes room for that of the next stage as
  // soon as it has served the last wave: to read takes long while the tensor cores read as well.
  static constexpr bool kHoldsColScales = !kSquareB && kWaves > 1;
  // Together as many as there are; where scales of columns are held, consumers need what producers can spare.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kHoldsColScales && Tiles::kRowsAreAligned ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : (504 - kProducerRegisters) / 2;
  static constexpr int kSums = kCols / 2;  // of a wave, by thread
  static constexpr bool kReadsAhead = kSquareB || kHoldsColScales;  // all of a stage before its products are done
  // Products are one ahead of additions where these take long, as those of sums that are scaled by columns as well, and where
  // the code of many stages does not fit into registers beside what it takes to add to the output: see sum_ahead.
  static constexpr bool kIsOneAhead = !kSquareB || (kAdds && kWaves == 1);
  static constexpr int kInRow = kAdds ? 1 : 8;  // else, stages without a branch on whether there is another
  // Whether the code of a stage knows its place in shared memory; of many stages registers do not suffice for that.
  static constexpr bool kKnowsStages = kIsOneAhead && kStages <= 4 && (kSquareB || kConsumers == 2);
  // A stage is filled in as many parts as there are waves: the rows of the first are free while those of the next are
  // multiplied. What is not rows can be copied with the last part only, since it is needed until then, but at the barrier of
  // the first, which needs it as well.
  static_assert(kWaves <= 2, "a tile has rows for all waves, for the first, or for none");
  static constexpr int kParts = kWaves, kPartRows = kRows / kParts, kPartBytes = kPartRows * kDepth;
  static constexpr int kBoxes = kWaves * kCols * Out::kBytes / 128;  // of the output, of a consumer
  // Scales of rows are copied from a multiple of four rows on. Where tiles do not begin at one, there are four more in each
  // box, and two boxes: one has at most 256.
  static constexpr int kScaleBoxes = Tiles::kRowsAreAligned ? 1 : 2, kRowsOfBox = kRows / kScaleBoxes;
  static constexpr int kScalesOfBox = kRowsOfBox + (Tiles::kRowsAreAligned ? 0 : 4);
  static constexpr int kBoxPitch = (kScalesOfBox + 31) / 32 * 32;
  // Scales of B that are read for a stage. Of squares 4 along their rows, no less than the engine can; a tile whose columns
  // are no multiple of 128 has parts of two squares: 64 columns of one, 64 of either, 64 of the next.
  static constexpr int kScaleDepth = 4, kSquares = kCols > 128 ? 2 : 1, kColParts = kCols > 128 ? kCols / 64 : 1;
  static constexpr int kScales = kSquareB ? kScaleDepth * kSquares : kCols;
  static constexpr uint32_t kStageBytes = (kRows + kCols) * kDepth + (kScaleBoxes * kScalesOfBox + kScales) * 4;

  struct Params {
    TensorMap a, a_scale, b, b_scale, out;
    const void* bias;         // (groups, cols)
    const float* row_factor;  // of each row of the output, which it is multiplied by; or null
    void* out_data;
    int64_t out_stride;
    int32_t bias_type;
    int32_t cols;
    int32_t has_map;  // whether the copy engine can write `out`
    typename Tiles::Params tiles;
  };

  using Roles = Persistent<GemmFloat8Block, Tile, kConsumers, kCluster, kStages>;
  using Output = Epilogue<Params, Out, kConsumers, kWaves, kCols, kBoxes % 2 ? kBoxes : 2, kAdds>;

  struct Shared {
    alignas(1024) uint8_t a[kStages][kRows * kDepth];
    alignas(1024) uint8_t b[kStages][kCols * kDepth];
    alignas(1024) typename Output::Buffer out[kConsumers];
    alignas(128) float a_scale[kStages][kScaleBoxes * kBoxPitch];
    alignas(128) float b_scale[kStages][kSquareB ? 32 : kCols];
    NextTile<Tile> next;
    Tile tile[kStages];  // that begins with the stage
    Barrier full[kStages][kParts], empty[kStages][kParts];
    Barrier raw[kTurnsB ? kStages : 1];  // B is there, not yet turned
    Barrier held[kConsumers];  // what `out` holds, of kAdds, is there
  };
  static constexpr int kSharedBytes = sizeof(Shared), kClusterBlocks = kCluster;

  const Params& p;
  Shared& shared;
  uint32_t block;  // of the cluster

  TE_DIST_INLINE void run(const Params& p) { Roles::run(p); }

  TE_DIST_DEVICE void init_barriers() const {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) shared.held[c].init(1);
  }

  // Stages of a tile. Where there is nothing to sum there is one that holds nothing.
  TE_DIST_INLINE int stages_of(const Tile& t) { return t.depth_tiles > 0 ? t.depth_tiles : 1; }

  // Copies a box of what all blocks of the cluster read: they take turns, each for all of them.
  TE_DIST_DEVICE void copy_rows(const TensorMap& map, Barrier& full, void* target, int x, int y, int k) const {
    if constexpr (kCluster == 1) {
      copy_box(map, full, target, x, y);
    } else if (k % kCluster == int(block)) {
      copy_box_to_many(map, full, target, x, y, (1 << kCluster) - 1);
    }
  }

  // Begins to fill a part of stage number `k` of a tile: its rows, and with the last part all that is not rows. One thread
  // does.
  TE_DIST_DEVICE void read(const Tile& t, uint32_t s, int k, int part) const {
    const int depth = t.first_depth + k * kDepth, depth_tile = uint32_t(depth + kDepth - 1) / kDepth;
    Barrier(&full)[kParts] = shared.full[s];
    Barrier& b_there = kTurnsB ? shared.raw[s] : full[0];
    if (t.depth_tiles == 0) {
      full[part].arrive();
      if (kTurnsB && part == kParts - 1) b_there.arrive();
      return;
    }
    const bool is_last = part == kParts - 1;
    if (is_last) {
      copy_box(p.b, b_there, shared.b[s], kTurnsB ? t.col : depth, t.b_row + (kTurnsB ? depth : 0));
      if constexpr (kTurnsB) b_there.expect(kCols * kDepth);
    }
    copy_rows(p.a, full[part], &shared.a[s][part * kPartBytes], depth, t.row + part * kPartRows, k);
    if (part > 0) full[part].expect(kPartBytes);
    if (!is_last) return;
#pragma unroll
    for (int i = 0; i < kScaleBoxes; ++i) {
      copy_rows(p.a_scale, full[0], &shared.a_scale[s][i * kBoxPitch], (t.row & -4) + i * kRowsOfBox, depth_tile, k);
    }
    if constexpr (kTurnsB) {
      copy_box(p.b_scale, full[0], shared.b_scale[s], t.col / kDepth & -kScaleDepth, t.b_scale_row + k);
    } else if constexpr (kSquareB) {
      copy_box(p.b_scale, full[0], shared.b_scale[s], depth_tile & -kScaleDepth, t.b_scale_row);
    } else {
      copy_box(p.b_scale, full[0], shared.b_scale[s], t.col, t.b_scale_row + k);
    }
    full[0].expect(kStageBytes - (kParts - 1) * kPartBytes - (kTurnsB ? kCols * kDepth : 0));
    Output::prefetch(p, t, k, t.depth_tiles);
  }

  // What one of kPreparers warps does with a stage.
  TE_DIST_DEVICE void prepare(int stage, int warp) const {
    TileTurner::of(warp).turn(shared_address(shared.b[stage]));
    fence_shared_for_async();
  }

  struct Consumer {
    const GemmFloat8Block& gemm;
    int group;  // which consumer
    int row, col;  // of the first value of this thread inside the tile of a wave
    Rows128 first_a, first_b;  // operands of the first wave in the first stage
    Output output;
    float sums[kWaves][kSums];

    TE_DIST_DEVICE Shared& shared() const { return gemm.shared; }

    TE_DIST_DEVICE int wave_row(int wave) const { return (wave * kConsumers + group) * 64; }

    // kIsTogether: whether waiting for the tensor cores has brought the lanes together, and nothing was read since.
    template <bool kIsTogether>
    TE_DIST_DEVICE void release(int stage, int part = kParts - 1) const {
      if constexpr (!kIsTogether) __syncwarp();
      Roles::release(shared().empty[stage][part]);
    }

    // What is read of a stage besides codes: for the first and the second row of each wave its scale, by that of the square
    // of each part of the columns.
    struct Scales {
      float rows[kWaves][2][kColParts];
    };

    // Of stage number `k` of a tile.
    TE_DIST_DEVICE Scales scales(const Tile& t, int stage, int k) const {
      Scales scales;
      float squares[kColParts] = {};
      if constexpr (kSquareB) {
        const float* its = &shared().b_scale[stage][(kTurnsB ? t.col / kDepth : k) % kScaleDepth];
#pragma unroll
        for (int c = 0; c < kColParts; ++c) squares[c] = its[c == 0 ? 0 : kScaleDepth];
        if (kColParts == 3 && (t.col + gemm.p.tiles.phase.col) % 128 == 0) squares[1] = squares[0];
      }
      const float* rows = &shared().a_scale[stage][Tiles::kRowsAreAligned ? 0 : t.row & 3];
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int its = wave_row(w) + row + 8 * h;
          const float scale = rows[its / kRowsOfBox * kBoxPitch + its % kRowsOfBox];
#pragma unroll
          for (int c = 0; c < kColParts; ++c) scales.rows[w][h][c] = kSquareB ? scale * squares[c] : scale;
        }
      }
      return scales;
    }

    // Waves that have rows of the tile; at the end of a group, or of the matrix, some may have none.
    TE_DIST_DEVICE int live_waves(const Tile& t) const {
      return min(kWaves, (t.out_end - t.out_row - wave_row(0) + kPartRows - 1) / kPartRows);
    }

    // Begins to sum over the 128 values of a stage, for the rows of a wave.
    TE_DIST_DEVICE void multiply(float (&part)[kSums], int stage, int wave) const {
      const Rows128 a = first_a.template further<kRows * kDepth>(stage).template further<kPartRows * kDepth>(wave);
      const Rows128 b = first_b.template further<kCols * kDepth>(stage);
      pin(part);
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) {
        multiply_64xNx32<CodeA, CodeB>(part, a.template further<32>(k), b.template further<32>(k), k > 0);
      }
      commit_products();
      pin(part);
    }

    // Scales of the columns of this thread; of squares there are none.
    struct ColScales {
      const Consumer& consumer;
      float2 held[kHoldsColScales ? kSums / 4 : 1];

      TE_DIST_DEVICE float2 read(int stage, int j) const {
        return *reinterpret_cast<const float2*>(&consumer.shared().b_scale[stage][consumer.col + j * 8]);
      }

      // Those of values 4 j to 4 j + 3.
      TE_DIST_DEVICE void hold(int stage, int j) {
        if constexpr (kHoldsColScales) held[j] = read(stage, j);
      }
      TE_DIST_DEVICE float2 at(int stage, int j) const {
        if constexpr (kSquareB) {
          return make_float2(1.0f, 1.0f);
        } else if constexpr (kHoldsColScales) {
          return held[j];
        } else {
          return read(stage, j);
        }
      }
    };

    // Adds the sums of a stage and a wave. From then on scales of columns are held of the stage `next`, unless it is negative.
    TE_DIST_DEVICE void add(const float (&part)[kSums], float (&total)[kSums], const float (&rows)[2][kColParts],
                            ColScales& cols, int stage, int next) const {
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const float2 its = cols.at(stage, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = kSquareB ? part[4 * j + i] : part[4 * j + i] * (i % 2 ? its.y : its.x);
          total[4 * j + i] = fmaf(value, rows[i / 2][kColParts > 1 ? j / 8 : 0], total[4 * j + i]);
        }
        if (next >= 0) cols.hold(next, j);
      }
    }

    // Adds stage number `k` of a tile, of which the first product has begun; and begins that of the next, or not.
    template <int kLive>
    TE_DIST_DEVICE void add_stage(const Tile& t, float (&part)[kSums], ColScales& cols, int stage, int k, bool begins_next,
                                  Ring<kStages>& ring) {
      const Scales its = scales(t, stage, k);
      const uint32_t parity = ring.parity;
      ring.advance();
      const int next = kKnowsStages ? (stage + 1) % kStages : int(ring.stage);
#pragma unroll
      for (int w = 0; w < kLive; ++w) {
        const bool ends = w == kLive - 1, then_next = ends && begins_next;
        if (kAdds && k == t.depth_tiles / 2) output.fetch(t);  // what was written before has been read by then
        if (w + 1 < kParts) shared().full[stage][w + 1].wait(parity);
        if (then_next) shared().full[next][0].wait(ring.parity);
        wait_products<0>();
        pin(part);
        if (w < kParts - 1) release<true>(stage, w);
        if (ends && kReadsAhead) release<true>(stage);
        add(part, sums[w], its.rows[w], cols, stage, then_next ? next : -1);
        if (ends && !kReadsAhead) release<false>(stage);
        if (!ends) multiply(part, stage, w + 1);
        if (then_next) multiply(part, next, 0);
      }
    }

    // Sums of the first kLive waves; of a tile without any, or without depth, there are none.
    //
    // What leads from the end of an addition to the next product is as short as it can be, since the tensor cores have no
    // more to do for this consumer meanwhile: a wave is either in the code or not, and most stages follow each other without
    // a branch on whether there is another, past which the compiler moves nothing.
    template <int kLive>
    TE_DIST_DEVICE void sum_waves(const Tile& t, Ring<kStages>& ring) {
      float part[kSums];
      ColScales cols{*this, {}};
      if constexpr (kIsOneAhead) {
        sum_ahead<kLive>(t, part, cols, ring);
      } else {
        int k = 0;
        for (; k + kInRow <= t.depth_tiles; k += kInRow) {
#pragma unroll
          for (int i = 0; i < kInRow; ++i) sum_stage<kLive>(t, part, cols, k + i, ring);
        }
#pragma unroll 1
        for (; k < t.depth_tiles; ++k) sum_stage<kLive>(t, part, cols, k, ring);
      }
    }

    // From when a stage is full until it is free.
    template <int kLive>
    TE_DIST_DEVICE void sum_stage(const Tile& t, float (&part)[kSums], ColScales& cols, int k, Ring<kStages>& ring) {
      const int stage = ring.stage;
      shared().full[stage][0].wait(ring.parity);
      multiply(part, stage, 0);
      add_stage<kLive>(t, part, cols, stage, k, false, ring);
    }

    // A stage is waited for before that in front of it is added for the last time, and begins when it is. Of few stages each
    // has code of its own, for which the compiler finds the places in shared memory in advance.
    template <int kLive>
    TE_DIST_DEVICE void sum_ahead(const Tile& t, float (&part)[kSums], ColScales& cols, Ring<kStages>& ring) {
      multiply(part, ring.stage, 0);
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) cols.hold(ring.stage, j);
      if constexpr (kKnowsStages) {
        for (int k = -int(ring.stage); k < t.depth_tiles; k += kStages) {
#pragma unroll
          for (int stage = 0; stage < kStages; ++stage) {
            if (const int at = k + stage; at >= 0 && at < t.depth_tiles) {
              add_stage<kLive>(t, part, cols, stage, at, at + 1 < t.depth_tiles, ring);
            }
          }
        }
      } else {
        for (int k = 0; k < t.depth_tiles; ++k) {
          add_stage<kLive>(t, part, cols, ring.stage, k, k + 1 < t.depth_tiles, ring);
        }
      }
    }

    TE_DIST_DEVICE void pass_over(const Tile& t, Ring<kStages>& ring) {
      for (int k = 0, end = stages_of(t); k < end; ++k, ring.advance()) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          shared().full[ring.stage][part].wait(ring.parity);
          release<false>(ring.stage, part);
        }
      }
    }

    TE_DIST_DEVICE void sum_tile(const Tile& t, Ring<kStages>& ring) {
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[w][i] = 0.0f;
      }
      const int live = t.depth_tiles == 0 ? 0 : live_waves(t);
      if (live >= kWaves) return sum_waves<kWaves>(t, ring);
      if (kWaves > 1 && live == 1) return sum_waves<1>(t, ring);
      pass_over(t, ring);
    }

    TE_DIST_DEVICE void compute(const Tile& t, Ring<kStages>& ring) {
      sum_tile(t, ring);
      if (kAdds && t.depth_tiles == 0) return;
      if constexpr (Tiles::kHasBias) output.finish(t, sums);
      output.write(t, sums);
    }
  };

  TE_DIST_DEVICE Consumer consumer(int group) const {
    const int lane = threadIdx.x % 32;
    const Rows128 a = Rows128::at(shared_address(shared.a[0])).template further<64 * kDepth>(group);
    const Rows128 b = Rows128::at(shared_address(shared.b[0]));
    const int row = int(threadIdx.x) / 32 % 4 * 16 + lane / 4, col = lane % 4 * 2;
    const Output output{p, shared.out[group], &shared.held[group], group, row, col, 0};
    return {*this, group, row, col, a, b, output, {}};
  }
};

}  // namespace te_dist::cuda
