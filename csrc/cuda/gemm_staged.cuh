// Products of matrices of codes with scale bytes, decoded on their way to bf16 or fp16 tensor cores, once or in groups:
// as gemm_decoded.cuh, for matrices that the bulk copy engine can read.
//
// One block of threads stays on each multiprocessor and walks over tiles of 128 x kWidth, 64 summed values at a time.
// The bulk copy engine fills a ring with codes, a warpgroup decodes them into a second ring, two multiply, 64 rows each.
// The warpgroup that decodes is what the others wait for.
#pragma once

#include "common/fours.cuh"
#include "common/stage.cuh"
#include "common/tiles.cuh"

namespace te_dist::cuda {

constexpr int kMultipliers = 256;  // threads that multiply
constexpr int kDecoders = 128;     // threads that decode
constexpr int kHeight = 128;       // rows of a tile

// fp32 for every kept value of an operand, for every group, or for all (strides 0); null: 1.
struct Factor {
  const float* data;
  int64_t kept_stride, group_stride;

  TE_DIST_DEVICE float of(int kept, int group) const {
    return data ? __ldg(data + kept * kept_stride + group * group_stride) : 1.0f;
  }
};

// Walk: which tiles there are, see common/tiles.cuh.
template <template <class> class Walk, class A, class B, HalfType kType, int kWidth>
struct GemmStaged {
  static_assert(kWidth == 256 || kWidth == 128, "a tile is as wide as a product");
  static constexpr int kThreads = kMultipliers + kDecoders, kBlocks = 1, kClusterBlocks = 1;
  static constexpr int kSums = kWidth / 2;
  static constexpr uint32_t kBytesA = kHeight * 128, kBytesB = kWidth * 128;  // of values
  using Shape = TileShape<kHeight, kWidth, 1, false>;
  using Tiles = Walk<Shape>;
  using StageA = Stage<A, kType, kHeight, distance_of<A, B, kType>()>;
  using StageB = Stage<B, kType, kWidth, distance_of<A, B, kType>()>;
  static constexpr uint32_t kBytesCodes = StageA::kCodeBytes + StageB::kCodeBytes;
  static constexpr int kStages = kWidth == 256 ? 3 : 4, kCodeStages = kBytesCodes > 16384 ? 2 : 3;
  static constexpr float kLeftOut = StageA::Decode::kLeftOut * StageB::Decode::kLeftOut;

  struct Params {
    TensorMap a, b;
    ScaleView a_scale, b_scale;
    Factor a_factor, b_factor;
    double constant;
    const void* bias;         // (groups, cols), or null
    const float* row_factor;  // of each row of the output, which it is multiplied by at last; or null
    void* out;
    int64_t pitch;  // of `out`, in elements
    int32_t bias_type, out_type;
    int32_t adds;       // to what is there; fp32 alone
    int32_t fours_fit;  // four neighbours can be written at a time
    int32_t cols;
    int32_t steps;     // of a tile; 0: as many as its group has
    int32_t b_summed;  // lines of a group, of a turned B
    typename Tiles::Params tiles;
  };


  struct Shared {
    alignas(1024) char values[kStages][kBytesA + kBytesB];
    alignas(1024) char codes[kCodeStages][kBytesCodes];
    SumsPatch patches[kMultipliers / 32];
    Barrier full[kStages], empty[kStages], codes_full[kCodeStages], codes_empty[kCodeStages];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  const Params& p;
  Shared& shared;

  TE_DIST_INLINE void run(const Params& p) {
    extern __shared__ __align__(1024) char memory[];
    const GemmStaged gemm{p, *reinterpret_cast<Shared*>(memory)};
    if (threadIdx.x == 0) gemm.init_barriers();
    __syncthreads();
    if (threadIdx.x < kMultipliers) {
      give_registers<160>();
      gemm.multiply_tiles();
    } else {
      take_registers<184>();  // of 3 x 168 that a thread of each warpgroup has at first
      gemm.decode_tiles();
    }
  }

  TE_DIST_DEVICE void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(kDecoders / 32);
      shared.empty[i].init(kMultipliers / 32);
    }
    for (int i = 0; i < kCodeStages; ++i) {
      shared.codes_full[i].init(1);
      shared.codes_empty[i].init(kDecoders / 32);
    }
    fence_barrier_init();
  }

  // Goes over the tiles of this block, and over the steps of each.
  struct Cursor {
    const Params& p;
    const Tiles tiles;
    int index, end, step, steps;
    Tile tile;

    TE_DIST_DEVICE explicit Cursor(const Params& p)
        : p(p), tiles{p.tiles}, index(blockIdx.x), end(tiles.count()), step(0) {
      if (exists()) seek();
    }

    TE_DIST_DEVICE bool exists() const { return index < end; }

    TE_DIST_DEVICE void seek() {
      tile = tiles.at(index, 0);
      steps = p.steps ? p.steps : tile.depth_tiles * (Shape::kDepth / kStep);
    }

    TE_DIST_DEVICE void next_tile() {
      step = 0, index += gridDim.x;
      if (exists()) seek();
    }

    // To the first step that there is, from this one on.
    TE_DIST_DEVICE void settle() {
      while (exists() && step >= steps) next_tile();
    }

    TE_DIST_DEVICE int position_a() const { return tile.first_depth * Shape::kDepth + step * kStep; }
    TE_DIST_DEVICE int position_b() const { return position_a() + tile.group * p.b_summed; }
  };

  TE_DIST_DEVICE uint32_t values_a(int stage) const { return shared_address(shared.values[stage]); }
  TE_DIST_DEVICE uint32_t values_b(int stage) const { return values_a(stage) + kBytesA; }

  // Begins to read the codes of a step, and goes on to the next.
  TE_DIST_DEVICE void load_codes(Cursor& ahead, int stage) const {
    if (!ahead.exists()) return;
    if (threadIdx.x == kMultipliers) {
      Barrier& full = shared.codes_full[stage];
      full.expect(kBytesCodes);
      StageA::load_codes(p.a, full, shared.codes[stage], ahead.tile.row, ahead.position_a());
      StageB::load_codes(p.b, full, shared.codes[stage] + StageA::kCodeBytes, ahead.tile.b_row, ahead.position_b());
    }
    ++ahead.step;
    ahead.settle();
  }

  struct Scales {
    typename StageA::Scales a;
    typename StageB::Scales b;
  };

  TE_DIST_DEVICE void decode_tiles() const {
    const int thread = threadIdx.x - kMultipliers;
    const bool loads = thread < 32;
    const StageA a(thread);
    const StageB b(thread);
    Cursor ahead(p), next(p);
    ahead.settle(), next.settle();
    if (loads) {
      for (int i = 0; i < kCodeStages; ++i) load_codes(ahead, i);
    }
    Scales read_ahead;
    const auto load_scales = [&] {
      if (!next.exists()) return;
      a.load_scales(p.a_scale, next.tile.row, next.position_a(), read_ahead.a);
      b.load_scales(p.b_scale, next.tile.b_row, next.position_b(), read_ahead.b);
    };
    load_scales();
    Ring<kStages> ring;
    Ring<kCodeStages> from;
    for (; next.exists(); ring.advance(), from.advance()) {
      const Scales scales = read_ahead;
      const int position = next.step * kStep;  // from where on scales are in a word; tiles begin with one
      ++next.step;
      next.settle();
      load_scales();
      const uint32_t codes = shared_address(shared.codes[from.stage]);
      shared.codes_full[from.stage].wait(from.parity);
      shared.empty[ring.stage].wait(ring.parity ^ 1);
      a.decode(codes, scales.a, position, values_a(ring.stage));
      b.decode(codes + StageA::kCodeBytes, scales.b, position, values_b(ring.stage));
      __syncwarp();
      if (thread % 32 == 0) {
        shared.full[ring.stage].arrive();
        shared.codes_empty[from.stage].arrive();
      }
      if (loads) {
        shared.codes_empty[from.stage].wait(from.parity);
        load_codes(ahead, from.stage);
      }
    }
  }

  using Sums = float[kSums];

  TE_DIST_DEVICE void multiply_tiles() const {
    Ring<kStages> ring;
    for (Cursor cursor(p); cursor.exists(); cursor.next_tile()) {
      Sums sums;
      sum(sums, cursor.steps, ring);
      write(sums, cursor.tile);
    }
  }

  TE_DIST_DEVICE void sum(Sums& sums, int steps, Ring<kStages>& ring) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    uint32_t previous = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      multiply_stage(sums, ring.stage);
      if (step) {
        wait_products<1>();
        release(previous);
      }
      previous = ring.stage;
    }
    wait_products<0>();
    pin(sums);
    if (steps) release(previous);
  }

  // Adds the four products of a stage.
  TE_DIST_DEVICE void multiply_stage(Sums& sums, uint32_t stage) const {
    const uint64_t first = operand_descriptor<A::kAlong>(values_a(stage) + threadIdx.x / 128 * 8192);
    const uint64_t second = operand_descriptor<B::kAlong>(values_b(stage));
    // NOTE: by those who multiply. A fence of those who decode would wait for the scales they read ahead.
    fence_shared_for_async();
    pin(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      multiply_by_16<kType, A::kAlong, B::kAlong>(sums, first + i * kNextProduct<A::kAlong>,
                                                  second + i * kNextProduct<B::kAlong>, true);
    }
    commit_products();
    pin(sums);
  }

  TE_DIST_DEVICE void release(uint32_t stage) const {
    if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
  }

  // What four neighbouring columns of the output need besides sums.
  struct Columns {
    float by[4], bias[4];
    int count;  // of those that exist
  };

  TE_DIST_DEVICE Columns columns(const Tile& tile, int col) const {
    Columns its;
    its.count = p.cols - col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = i < its.count;
      its.by[i] = exists ? p.b_factor.of(col + i, tile.group) : 0.0f;
      its.bias[i] = exists && p.bias ? bias_of(p, int64_t(tile.group) * p.cols + col + i) : 0.0f;
    }
    return its;
  }

  // Of a warp's 16 rows, 32 columns at a time, by way of shared memory: neighbouring lanes write neighbouring columns.
  TE_DIST_DEVICE void write(const Sums& sums, const Tile& tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& patch = shared.patches[warp];
#pragma unroll
    for (int i = 0; i < kWidth; i += kPatchCols) {
      put_patch(sums, i, patch);
      const int in_patch = lane % 8 * 4, col = tile.col + i + in_patch;
      const Columns its = columns(tile, col);
#pragma unroll 1
      for (int row = lane / 8; row < 16; row += 4) {
        const int its_row = tile.out_row + warp * 16 + row;
        if (its_row >= tile.out_end || its.count <= 0) continue;
        write_four(*reinterpret_cast<const float4*>(&patch[row][in_patch]), its, tile.group, its_row, col);
      }
    }
  }

  TE_DIST_DEVICE void write_four(float4 sums, const Columns& its, int group, int row, int col) const {
    float values[4] = {sums.x, sums.y, sums.z, sums.w};
    const float by = float(p.constant) * kLeftOut * p.a_factor.of(row, group);
    const float at_last = p.row_factor ? __ldg(p.row_factor + row) : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = (values[i] * by * its.by[i] + its.bias[i]) * at_last;
    const int count = min(its.count, 4);
    write_values(p, values, count, row * p.pitch + col);
  }
};

}  // namespace te_dist::cuda
