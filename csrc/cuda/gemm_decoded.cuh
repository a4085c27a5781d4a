// Products of matrices that the tensor cores cannot read as they are stored. Codes are decoded on their way from global
// to shared memory, into bf16 or fp16, and multiplied there.
//
// A block of threads computes tiles of 128 x kWidth, one after the other. One warpgroup fetches and decodes, 64 summed
// values of both operands at a time, into a ring of buffers; two multiply, 64 rows each.
#pragma once

#include "common/fetch.cuh"
#include "common/fours.cuh"
#include "common/pipeline.cuh"

namespace te_dist::cuda {

constexpr int kMultipliers = 256; // threads that multiply
constexpr int kHeight = 128;      // rows of a tile
constexpr int kSteps = 2;         // in the 128 summed values of an fp32 scale

// Tiles in an order in which neighbours in time share lines of both operands.
struct Tiles {
  static constexpr int kGroup = 8;
  int rows, cols;

  TE_DIST_DEVICE int count() const { return rows * cols; }
  TE_DIST_DEVICE int row_of(int tile) const { return first_of(tile) + tile % (kGroup * cols) % size_of(tile); }
  TE_DIST_DEVICE int col_of(int tile) const { return tile % (kGroup * cols) / size_of(tile); }

 private:
  TE_DIST_DEVICE int first_of(int tile) const { return tile / (kGroup * cols) * kGroup; }
  TE_DIST_DEVICE int size_of(int tile) const { return min(kGroup, rows - first_of(tile)); }
};

// kScaledSums: fp32 scales of 128 summed values, of either operand or both, are applied to sums of as many.
template <class A, class B, HalfType kType, int kWidth, bool kScaledSums>
struct GemmDecoded {
  static_assert(kWidth == 256 || kWidth == 128, "a tile is as wide as a product");
  static_assert(kWidth == 128 || !kScaledSums, "scaled sums take as many registers again");
  static constexpr int kThreads = kMultipliers + kDecoders;
  static constexpr int kBlocks = 1;
  static constexpr int kClusterBlocks = 1;
  static constexpr int kSums = kWidth / 2;
  static constexpr int kStages = kWidth == 256 ? 4 : 6;
  static constexpr uint32_t kBytesA = kHeight * 128, kBytesB = kWidth * 128;
  static constexpr uint32_t kBytesStage = kBytesA + kBytesB;
  using FetcherA = Fetcher<A, kType, kHeight, distance_of<A, B, kType>()>;
  using FetcherB = Fetcher<B, kType, kWidth, distance_of<A, B, kType>()>;
  static constexpr float kLeftOut = FetcherA::Decode::kLeftOut * FetcherB::Decode::kLeftOut;

  struct Params {
    OperandView a, b;
    int64_t summed, shift;  // values that are summed over, and the position of the first in their scales' tile
    void* out;
    int64_t pitch;  // of `out`, in elements
    const void* bias;  // null: none
    int bias_type, out_type;
    int adds;       // to what is there; fp32 alone
    int fours_fit;  // four neighbours can be written at a time
  };


  struct Shared {
    char buffers[kStages][kBytesStage];
    SumsPatch patches[kMultipliers / 32];
    float scales[kScaledSums ? kStages : 1][kHeight + kWidth];
    Barrier full[kStages], empty[kStages];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;

  const Params& p;
  Shared& shared;
  const Tiles tiles;
  const int num_steps;

  TE_DIST_INLINE void run(const Params& p) {
    extern __shared__ char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(kDecoders / 32 * kArriving);
        shared.empty[i].init(kMultipliers / 32 * kArriving);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const Tiles tiles{int((p.a.kept + kHeight - 1) / kHeight), int((p.b.kept + kWidth - 1) / kWidth)};
    const GemmDecoded block{p, shared, tiles, p.summed ? int((p.shift + p.summed + kStep - 1) / kStep) : 0};
    if (threadIdx.x < kMultipliers) {
      give_registers<160>();
      block.multiply_tiles();
    } else {
      take_registers<184>();  // of 3 x 168 that a thread of each warpgroup has at first
      block.decode_tiles();
    }
  }

  // Lanes of a warp that arrive at a barrier. Where threads themselves read what others wrote, all do: checkers of races do
  // not know that one lane may arrive for its warp.
  static constexpr int kArriving = kScaledSums ? 32 : 1;

  TE_DIST_INLINE void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < kArriving) barrier.arrive();
  }

  TE_DIST_DEVICE uint32_t buffer_a(int stage) const { return shared_address(shared.buffers[stage]); }
  TE_DIST_DEVICE uint32_t buffer_b(int stage) const { return buffer_a(stage) + kBytesA; }

  // fp32 scale of one kept value for the step.
  TE_DIST_INLINE float scale_of(const OperandView& view, int64_t index, int step) {
    if (!view.tile || index >= view.kept) return 1.0f;
    const int64_t place = (index + view.phase) / view.tile * view.scale_kept + step / kSteps * view.scale_summed;
    return __ldg(static_cast<const float*>(view.scales) + place);
  }

  TE_DIST_DEVICE void decode_tiles() const {
    const int thread = threadIdx.x - kMultipliers;
    FetcherA a(p.a, int(p.summed), int(p.shift), thread);
    FetcherB b(p.b, int(p.summed), int(p.shift), thread);
    if (num_steps == 0 || int(blockIdx.x) >= tiles.count()) return;
    Ring<kStages> ring;
    int next_step = 0, next_tile = blockIdx.x;
    const auto seek = [&] {
      const bool exists = next_tile < tiles.count();
      a.seek(exists ? int64_t(tiles.row_of(next_tile)) * kHeight : 0, exists);
      b.seek(exists ? int64_t(tiles.col_of(next_tile)) * kWidth : 0, exists);
    };
    typename FetcherA::Read next_a;
    typename FetcherB::Read next_b;
    seek();
    a.fetch(next_a), b.fetch(next_b);
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
      for (int step = 0; step < num_steps; ++step, ring.advance()) {
        const auto read_a = next_a;
        const auto read_b = next_b;
        if (++next_step < num_steps) {
          a.advance(), b.advance();
        } else {
          next_step = 0, next_tile += gridDim.x;
          seek();
        }
        a.fetch(next_a), b.fetch(next_b);
        float scale_a, scale_b;
        if constexpr (kScaledSums) {
          scale_a = scale_of(p.a, int64_t(tiles.row_of(tile)) * kHeight + thread, step);
          scale_b = scale_of(p.b, int64_t(tiles.col_of(tile)) * kWidth + thread, step);
        }
        shared.empty[ring.stage].wait(ring.parity ^ 1);
        if (!a.decode(read_a, buffer_a(ring.stage))) {
          FetcherA(p.a, int(p.summed), int(p.shift), thread)
              .decode_with_care(int64_t(tiles.row_of(tile)) * kHeight, step, buffer_a(ring.stage));
        }
        if (!b.decode(read_b, buffer_b(ring.stage))) {
          FetcherB(p.b, int(p.summed), int(p.shift), thread)
              .decode_with_care(int64_t(tiles.col_of(tile)) * kWidth, step, buffer_b(ring.stage));
        }
        if constexpr (kScaledSums) {
          shared.scales[ring.stage][thread] = scale_a;
          shared.scales[ring.stage][kHeight + thread] = scale_b;
        }
        arrive(shared.full[ring.stage]);
      }
    }
  }

  using Sums = float[kSums];

  TE_DIST_INLINE void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  }

  // The four products of a buffer.
  TE_DIST_DEVICE void multiply_stage(Sums& sums, uint32_t stage, bool adds) const {
    const uint64_t first = operand_descriptor<A::kAlong>(buffer_a(stage) + threadIdx.x / 128 * 8192);
    const uint64_t second = operand_descriptor<B::kAlong>(buffer_b(stage));
    // NOTE: by those who multiply. A fence of those who decode would wait for what they read ahead.
    fence_shared_for_async();
    pin(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      multiply_by_16<kType, A::kAlong, B::kAlong>(sums, first + i * kNextProduct<A::kAlong>,
                                                  second + i * kNextProduct<B::kAlong>, adds || i);
    }
    commit_products();
    pin(sums);
  }

  TE_DIST_DEVICE void release(uint32_t stage) const { arrive(shared.empty[stage]); }

  TE_DIST_DEVICE void multiply_tiles() const {
    Ring<kStages> ring;
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
      Sums sums;
      if constexpr (kScaledSums) {
        sum_scaled(sums, ring);
      } else {
        sum(sums, ring);
      }
      write(sums, int64_t(tiles.row_of(tile)) * kHeight, int64_t(tiles.col_of(tile)) * kWidth);
    }
  }

  TE_DIST_DEVICE void sum(Sums& sums, Ring<kStages>& ring) const {
    clear(sums);
    uint32_t previous = 0;
    for (int step = 0; step < num_steps; ++step, ring.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      multiply_stage(sums, ring.stage, true);
      if (step) {
        wait_products<1>();
        release(previous);
      }
      previous = ring.stage;
    }
    wait_products<0>();
    pin(sums);
    if (num_steps) release(previous);
  }

  TE_DIST_DEVICE void sum_scaled(Sums& sums, Ring<kStages>& ring) const {
    clear(sums);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = kHeight + threadIdx.x % 4 * 2;
    Sums part;
    for (int step = 0; step < num_steps; ++step, ring.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      multiply_stage(part, ring.stage, step % kSteps);
      wait_products<0>();
      pin(part);
      if (step % kSteps == kSteps - 1 || step == num_steps - 1) {
        const float* scales = shared.scales[ring.stage];
        const float upper = scales[row], lower = scales[row + 8];
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
          const float2 by = *reinterpret_cast<const float2*>(scales + col + i * 2);
          sums[i] = __fmaf_rn(part[i], upper * by.x, sums[i]);
          sums[i + 1] = __fmaf_rn(part[i + 1], upper * by.y, sums[i + 1]);
          sums[i + 2] = __fmaf_rn(part[i + 2], lower * by.x, sums[i + 2]);
          sums[i + 3] = __fmaf_rn(part[i + 3], lower * by.y, sums[i + 3]);
        }
      }
      release(ring.stage);
    }
  }

  // Of a warp's 16 rows, 32 columns at a time, by way of shared memory: neighbouring lanes write neighbouring columns.
  TE_DIST_DEVICE void write(const Sums& sums, int64_t first_row, int64_t first_col) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& patch = shared.patches[warp];
#pragma unroll
    for (int i = 0; i < kWidth; i += kPatchCols) {
      put_patch(sums, i, patch);
#pragma unroll 1
      for (int row = lane / 8; row < 16; row += 4) {
        const int col = lane % 8 * 4;
        write_four(*reinterpret_cast<const float4*>(&patch[row][col]), first_row + warp * 16 + row, first_col + i + col);
      }
    }
  }

  TE_DIST_DEVICE void write_four(float4 sums, int64_t row, int64_t col) const {
    if (row >= p.a.kept || col >= p.b.kept) return;
    float values[4] = {sums.x, sums.y, sums.z, sums.w};
    const int count = int(min(p.b.kept - col, int64_t(4)));
    const float by = p.a.factor_of(row) * kLeftOut;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      values[i] = values[i] * by * p.b.factor_of(col + i);
      if (p.bias) values[i] += bias_of(p, col + i);
    }
    write_values(p, values, count, row * p.pitch + col);
  }
};

}  // namespace te_dist::cuda
