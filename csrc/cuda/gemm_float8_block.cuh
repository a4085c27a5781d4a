// Product of two FP8 matrices with fp32 scales for every 128 values that are summed over: of A for a row, of B for a row
// or for 128 rows. out (M, N) = A (M, K) B (N, K)^T.
//
// One block of threads stays on each multiprocessor and walks over tiles of the product. A warpgroup of producers, of
// which one thread works, fills a ring of stages by the bulk copy engine; two or three warpgroups of consumers multiply.
// The tensor cores sum 128 values at a time, with 14 bits; each such sum is scaled and added in fp32. While one consumer
// does that, the others keep the tensor cores busy.
#pragma once

#include "common/memory.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace te_dist::cuda {

// Types of a bias.
enum class BiasType { kNone, kFloat32, kBFloat16, kFloat16 };

// kSquareB: B has a scale for 128 x 128, not for 1 x 128.
// kConsumers: how many. kWaves: 64 rows of the product that each computes one after the other, with the same part of B.
// kCluster: blocks side by side along N that read A once for all.
// kAdds: adds to what `out` holds. kBoxes: `out` is written by the copy engine, else value by value.
template <class CodeA, class CodeB, class Out, bool kSquareB, int kConsumers, int kWaves, int kCluster,
          int kStages, bool kAdds, bool kBoxes>
struct GemmFloat8Block {
  static constexpr int kThreads = 128 * (1 + kConsumers), kBlocks = 1;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kRows = 64 * kWaves * kConsumers, kCols = 128, kDepth = 128;  // of a tile
  static constexpr bool kHoldsColScales = kWaves > 1;  // from wave to wave, in registers
  static constexpr int kBoxBytes = 64 * 128, kBoxCols = 128 / Out::kBytes;  // of the output
  static constexpr int kBoxesOfTile = kWaves * kCols / kBoxCols, kBoxesInTurn = 2;  // of a consumer
  static constexpr int kTurns = kBoxesOfTile / kBoxesInTurn, kParts = kTurns > 1 ? 2 : 1;
  static constexpr int kSums = 64;  // of a wave, by thread

  struct Params {
    TensorMap a, a_scale, b, b_scale, out;
    const void* bias;
    void* out_data;
    int64_t out_stride;
    int32_t bias_type;
    int32_t rows, cols;
    int32_t row_tiles, col_tiles;  // of a cluster
    int32_t depth_tiles;
    int32_t band;  // tiles along M that are walked over together, so that what they read stays in the L2 cache
  };

  struct Shared {
    alignas(1024) uint8_t a[kStages][kRows * kDepth];
    alignas(1024) uint8_t b[kStages][kCols * kDepth];
    alignas(1024) uint8_t out[kConsumers][kParts][kBoxesInTurn * kBoxBytes];
    alignas(128) float a_scale[kStages][kRows];
    alignas(128) float b_scale[kStages][kSquareB ? 32 : kCols];
    Barrier full[kStages], empty[kStages];
  };
  static constexpr int kSharedBytes = sizeof(Shared), kClusterBlocks = kCluster;
  static constexpr int kScales = kSquareB ? 4 : kCols;  // of B that are read for a stage: no less than the engine can
  static constexpr uint32_t kStageBytes = (kRows + kCols) * kDepth + (kRows + kScales) * 4;

  const Params& p;
  Shared& shared;
  uint32_t block;  // of the cluster

  struct Tile {
    int row, col;  // first of the product
  };

  // Tile number `index` of this block. Tiles of a band lie side by side along M.
  TE_DIST_DEVICE Tile tile(int index) const {
    const int in_band = p.band * p.col_tiles, band = index / in_band, rest = index - band * in_band;
    const int first = band * p.band, height = min(p.band, p.row_tiles - first);
    const int col = rest / height;
    return {(first + rest - col * height) * kRows, (col * kCluster + int(block)) * kCols};
  }

  TE_DIST_DEVICE int first_tile() const { return blockIdx.x / kCluster; }
  TE_DIST_DEVICE int tile_step() const { return gridDim.x / kCluster; }
  TE_DIST_DEVICE int tiles() const { return p.row_tiles * p.col_tiles; }

  TE_DIST_DEVICE void produce() {
    constexpr int kShare = kRows / kCluster;  // rows of A that this block reads, for all of the cluster
    Ring<kStages> ring;
    for (int index = first_tile(); index < tiles(); index += tile_step()) {
      const Tile t = tile(index);
      for (int k = 0; k < p.depth_tiles; ++k, ring.advance()) {
        const uint32_t s = ring.stage;
        Barrier& full = shared.full[s];
        shared.empty[s].wait(ring.parity ^ 1);
        if constexpr (kCluster > 1) {
          const int own = int(block) * kShare;
          copy_box_to_many(p.a, full, &shared.a[s][own * kDepth], k * kDepth, t.row + own, (1 << kCluster) - 1);
        } else {
          copy_box(p.a, full, shared.a[s], k * kDepth, t.row);
        }
        copy_box(p.b, full, shared.b[s], k * kDepth, t.col);
        copy_box(p.a_scale, full, shared.a_scale[s], t.row, k);
        if constexpr (kSquareB) {
          copy_box(p.b_scale, full, shared.b_scale[s], k & -kScales, t.col / kDepth);
        } else {
          copy_box(p.b_scale, full, shared.b_scale[s], t.col, k);
        }
        full.expect(kStageBytes);
      }
    }
  }

  struct Consumer {
    const GemmFloat8Block& gemm;
    int group;  // which consumer
    int row, col;  // of the first value of this thread inside the tile of a wave
    Rows128 first_a, first_b;  // operands of the first wave in the first stage
    float sums[kWaves][kSums];

    TE_DIST_DEVICE Shared& shared() const { return gemm.shared; }

    TE_DIST_DEVICE int wave_row(int wave) const { return (group * kWaves + wave) * 64; }

    TE_DIST_DEVICE void release(int stage) const {
      const int lane = threadIdx.x % 32;
      if constexpr (kCluster > 1) {
        if (lane < kCluster) shared().empty[stage].arrive_at(lane);
      } else {
        if (lane == 0) shared().empty[stage].arrive();
      }
    }

    // What is read of a stage besides codes: for the first and the second row of each wave its scale, by that of a square.
    struct Scales {
      float rows[kWaves][2];
    };

    // Of stage number `k` of a tile.
    TE_DIST_DEVICE Scales scales(int stage, int k) const {
      Scales scales;
      const float square = kSquareB ? shared().b_scale[stage][k % kScales] : 1.0f;
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
        scales.rows[w][0] = shared().a_scale[stage][wave_row(w) + row] * square;
        scales.rows[w][1] = shared().a_scale[stage][wave_row(w) + row + 8] * square;
      }
      return scales;
    }

    // Begins to sum over the 128 values of a stage, for the rows of a wave.
    TE_DIST_DEVICE void multiply(float (&part)[kSums], int stage, int wave) const {
      const Rows128 a = first_a.further<kRows * kDepth>(stage).further<64 * kDepth>(wave);
      const Rows128 b = first_b.further<kCols * kDepth>(stage);
      pin(part);
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) {
        multiply_64x128x32<CodeA, CodeB>(part, a.further<32>(k), b.further<32>(k), k > 0);
      }
      commit_products();
      pin(part);
    }

    // Scales of the columns of this thread, for all waves; of squares there are none.
    struct ColScales {
      static constexpr int kHeld = !kSquareB && kHoldsColScales ? kSums / 4 : 1;
      const Consumer& consumer;
      int stage;
      float2 held[kHeld];

      TE_DIST_DEVICE float2 read(int j) const {
        return *reinterpret_cast<const float2*>(&consumer.shared().b_scale[stage][consumer.col + j * 8]);
      }
      // Of values 4 j to 4 j + 3.
      TE_DIST_DEVICE float2 at(int j) const {
        if constexpr (kSquareB) return make_float2(1.0f, 1.0f);
        return kHoldsColScales ? held[j % kHeld] : read(j);
      }
    };

    TE_DIST_DEVICE ColScales col_scales(int stage) const {
      ColScales scales{*this, stage, {}};
      if constexpr (!kSquareB && kHoldsColScales) {
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) scales.held[j] = scales.read(j);
      }
      return scales;
    }

    TE_DIST_DEVICE void add(const float (&part)[kSums], float (&total)[kSums], const float (&rows)[2],
                            const ColScales& cols) const {
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const float2 its = cols.at(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = kSquareB ? part[4 * j + i] : part[4 * j + i] * (i % 2 ? its.y : its.x);
          total[4 * j + i] = fmaf(value, rows[i / 2], total[4 * j + i]);
        }
      }
    }

    TE_DIST_DEVICE void sum_tile(Ring<kStages>& ring) {
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[w][i] = 0.0f;
      }
      shared().full[ring.stage].wait(ring.parity);
      for (int k = 0; k < gemm.p.depth_tiles; ++k) {
        const int stage = ring.stage;
        const ColScales cols = col_scales(stage);
        Scales its;
        ring.advance();
#pragma unroll
        for (int w = 0; w < kWaves; ++w) {
          float part[kSums];
          multiply(part, stage, w);
          // While the tensor cores work.
          if (w == 0) its = scales(stage, k);
          if (w == kWaves - 1 && k + 1 < gemm.p.depth_tiles) shared().full[ring.stage].wait(ring.parity);
          wait_products<0>();
          pin(part);
          constexpr bool kIsRead = kSquareB || kHoldsColScales;
          if (w == kWaves - 1 && kIsRead) release(stage);
          add(part, sums[w], its.rows[w], cols);
          if (w == kWaves - 1 && !kIsRead) release(stage);
        }
      }
    }

    template <class Element>
    TE_DIST_DEVICE void add_bias(int first_col) {
      const char* bias = static_cast<const char*>(gemm.p.bias);
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const int its_col = first_col + j / 4 * 8 + (j & 1);
        uint32_t word = 0;
        if (its_col < gemm.p.cols) load_words<Element::kBytes>(bias + its_col * Element::kBytes, &word);
#pragma unroll
        for (int w = 0; w < kWaves; ++w) sums[w][j] += Element::value(word, 0);
      }
    }

    TE_DIST_DEVICE void add_bias(const Tile& t) {
      const BiasType type = BiasType(gemm.p.bias_type);
      if (type == BiasType::kFloat32) add_bias<Float32>(t.col + col);
      if (type == BiasType::kBFloat16) add_bias<BFloat16>(t.col + col);
      if (type == BiasType::kFloat16) add_bias<Float16>(t.col + col);
    }

    TE_DIST_INLINE uint32_t packed(float first, float second) { return Out::store(first) | Out::store(second) << 16; }

    // Where this thread puts the first of its values into a box whose rows of 128 bytes lie in the 128-byte swizzle: 16 bytes,
    // number c of a row, change places with number c ^ (row % 8).
    TE_DIST_DEVICE uint32_t first_in_box() const {
      const int lane = threadIdx.x % 32;
      if constexpr (Out::kBytes == 2) {
        const int its_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
        return its_row * 128 + ((lane / 16) ^ (its_row & 7)) * 16;
      } else {
        return row * 128 + ((lane % 4 / 2) ^ (row & 7)) * 16 + lane % 2 * 8;
      }
    }

    // Puts the values of a wave from column `first` on into a box at `target` in shared memory.
    TE_DIST_DEVICE void put_box(int wave, int first, uint32_t target) const {
      const uint32_t at = target + first_in_box();
#pragma unroll
      for (int j = 0; j < kBoxCols / 8; j += Out::kBytes == 2 ? 2 : 1) {
        const float* v = &sums[wave][(first / 8 + j) * 4];
        if constexpr (Out::kBytes == 2) {
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ (j * 16)),
                       "r"(packed(v[0], v[1])), "r"(packed(v[2], v[3])), "r"(packed(v[4], v[5])), "r"(packed(v[6], v[7]))
                       : "memory");
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((at ^ (j * 32)) + h * 1024), "f"(v[2 * h]),
                         "f"(v[2 * h + 1])
                         : "memory");
          }
        }
      }
    }

    // By way of shared memory, which the copy engine reads while the next tile is computed; in turns, of which each fills one
    // part of it while the other may still be read.
    TE_DIST_DEVICE void write_boxes(const Tile& t) const {
      constexpr int kMayBeRead = (kParts - 1) * kBoxesInTurn;
      const bool is_first = threadIdx.x % 128 == 0;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const uint32_t part = shared_address(shared().out[group][turn % kParts]);
        if (is_first) wait_stores_read<kMayBeRead>();
        sync_threads(1 + group, 128);
#pragma unroll
        for (int i = 0; i < kBoxesInTurn; ++i) {
          const int first = (turn * kBoxesInTurn + i) * kBoxCols;
          put_box(first / kCols, first % kCols, part + i * kBoxBytes);
        }
        fence_shared_for_async();
        sync_threads(1 + group, 128);
        if (!is_first) continue;
#pragma unroll
        for (int i = 0; i < kBoxesInTurn; ++i) {
          const int first = (turn * kBoxesInTurn + i) * kBoxCols;
          store_box<kAdds>(gemm.p.out, part + i * kBoxBytes, t.col + first % kCols, t.row + wave_row(first / kCols));
        }
      }
    }

    TE_DIST_DEVICE void write_value(int its_row, int its_col, float value) const {
      const Params& p = gemm.p;
      if (its_row >= p.rows || its_col >= p.cols) return;
      const int64_t at = its_row * p.out_stride + its_col;
      if constexpr (Out::kBytes == 4) {
        float* out = static_cast<float*>(p.out_data) + at;
        *out = kAdds ? *out + value : value;
      } else {
        static_cast<uint16_t*>(p.out_data)[at] = uint16_t(Out::store(value));
      }
    }

    TE_DIST_DEVICE void write_values(const Tile& t) const {
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          write_value(t.row + wave_row(w) + row + (j & 2) * 4, t.col + col + j / 4 * 8 + (j & 1), sums[w][j]);
        }
      }
    }

    TE_DIST_DEVICE void consume() {
      Ring<kStages> ring;
      for (int index = gemm.first_tile(); index < gemm.tiles(); index += gemm.tile_step()) {
        const Tile t = gemm.tile(index);
        sum_tile(ring);
        add_bias(t);
        if constexpr (kBoxes) {
          write_boxes(t);
        } else {
          write_values(t);
        }
      }
      if (kBoxes && threadIdx.x % 128 == 0) wait_stores();
    }
  };

  TE_DIST_DEVICE void start() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        shared.full[s].init(1);
        shared.empty[s].init(kCluster * kConsumers * 4);
      }
      fence_barrier_init();
    }
    if constexpr (kCluster > 1) {
      sync_cluster();
    } else {
      __syncthreads();
    }
  }

  TE_DIST_INLINE void run(const Params& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    GemmFloat8Block gemm{p, *reinterpret_cast<Shared*>(memory), kCluster > 1 ? block_of_cluster() : 0};
    gemm.start();
    const int group = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x), 0) / 128;
    if (group == kConsumers) {
      give_registers<kProducerRegisters>();
      if (threadIdx.x == 128 * kConsumers) gemm.produce();
    } else {
      take_registers<kConsumerRegisters>();
      const int lane = threadIdx.x % 32;
      const Rows128 a = Rows128::at(shared_address(gemm.shared.a[0])).further<64 * kWaves * kDepth>(group);
      const Rows128 b = Rows128::at(shared_address(gemm.shared.b[0]));
      Consumer consumer{gemm, group, int(threadIdx.x) / 32 % 4 * 16 + lane / 4, lane % 4 * 2, a, b, {}};
      consumer.consume();
    }
    // Blocks of a cluster write into each other's shared memory: none may end before the others have.
    if constexpr (kCluster > 1) sync_cluster();
  }
};

}  // namespace te_dist::cuda
