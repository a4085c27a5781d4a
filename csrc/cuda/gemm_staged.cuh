// Products of matrices of codes with scale bytes, decoded on their way to bf16 or fp16 tensor cores, once or in groups:
// as gemm_decoded.cuh, for matrices that the bulk copy engine can read.
//
// One block of threads stays on each multiprocessor and walks over tiles of 128 or 256 rows and 128 columns, 64 summed
// values at a time. The bulk copy engine fills rings with codes. One warpgroup decodes those of B into rows of a ring in
// shared memory, which two warpgroups multiply; each decodes its own rows of A into registers meanwhile. So shared memory,
// which the tensor cores read as fast as it can be read, holds the values of one operand only.
#pragma once

#include "common/fours.cuh"
#include "common/stage.cuh"
#include "common/tiles.cuh"

namespace te_dist::cuda {

constexpr int kMultipliers = 256;  // threads that multiply
constexpr int kDecoders = 128;     // threads that decode B

// fp32 for every kept value of an operand, for every group, or for all (strides 0); null: 1.
struct Factor {
  const float* data;
  int64_t kept_stride, group_stride;

  TE_DIST_DEVICE float of(int kept, int group) const {
    return data ? __ldg(data + kept * kept_stride + group * group_stride) : 1.0f;
  }
};

// Walk: which tiles there are, see common/tiles.cuh. kWaves: 64 rows that each warpgroup multiplies one after the other.
template <template <class> class Walk, class A, class B, HalfType kType, int kWaves>
struct GemmStaged {
  static constexpr int kThreads = kMultipliers + kDecoders, kBlocks = 1, kClusterBlocks = 1;
  static constexpr int kRows = 128 * kWaves, kCols = 128, kSums = kCols / 2;
  static constexpr int kDistance = A::kTurned || B::kTurned ? 1 : distance_of<A, B, kType>();
  using Shape = TileShape<kRows, kCols, 1, false>;
  using Tiles = Walk<Shape>;
  using Left = Fragments<A, kType, kWaves, kDistance>;
  using Right = Stage<B, kType, Left::kNatural, kDistance>;
  static constexpr uint32_t kBytesB = kCols * kStep * 2;  // of values
  // Of rings: of values, and of codes. Those of A have been read when the stage of values that they are multiplied with is
  // given up, so that nobody has to say so.
  static constexpr int kStages = 4, kCodeStagesA = 6, kCodeStagesB = 4;
  static constexpr float kLeftOut = Left::Decode::kLeftOut * Right::Decode::kLeftOut;

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
    alignas(1024) char values[kStages][kBytesB];
    alignas(1024) char codes_a[kCodeStagesA][Left::kBytes];
    alignas(1024) char codes_b[kCodeStagesB][Right::kBytes];
    alignas(16) uint32_t scales_a[kStages][Left::kScaleWords];
    SumsPatch patches[kMultipliers / 32];
    Barrier full[kStages], empty[kStages];
    Barrier a_full[kCodeStagesA], b_full[kCodeStagesB], b_empty[kCodeStagesB];
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
      take_registers<208>();  // of 3 x 168 that a thread of each warpgroup has at first
      gemm.multiply_tiles();
    } else {
      give_registers<88>();
      gemm.decode_tiles();
    }
  }

  TE_DIST_DEVICE void init_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(kDecoders / 32);
      shared.empty[i].init(kMultipliers / 32);
    }
    for (int i = 0; i < kCodeStagesA; ++i) shared.a_full[i].init(1);
    for (int i = 0; i < kCodeStagesB; ++i) {
      shared.b_full[i].init(1);
      shared.b_empty[i].init(kDecoders / 32);
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

    TE_DIST_DEVICE void advance() {
      ++step;
      settle();
    }

    TE_DIST_DEVICE int position_a() const { return tile.first_depth + step * kStep; }
    TE_DIST_DEVICE int position_b() const { return position_a() + tile.group * p.b_summed; }
  };

  // Begins to read codes of an operand.
  template <class Operand>
  TE_DIST_INLINE void load(const TensorMap& map, Barrier& full, char (&codes)[Operand::kBytes], int line, int position) {
    full.expect(Operand::kBytes);
    Operand::load_codes(map, full, codes, line, position);
  }

  // Begin to read the codes of a step, one thread of a warp, and go on to the next.
  TE_DIST_DEVICE void load_a(Cursor& ahead, uint32_t stage) const {
    if (!ahead.exists()) return;
    if (elect()) load<Left>(p.a, shared.a_full[stage], shared.codes_a[stage], ahead.tile.row, ahead.position_a());
    ahead.advance();
  }

  TE_DIST_DEVICE void load_b(Cursor& ahead, uint32_t stage) const {
    if (!ahead.exists()) return;
    if (elect()) load<Right>(p.b, shared.b_full[stage], shared.codes_b[stage], ahead.tile.b_row, ahead.position_b());
    ahead.advance();
  }

  // Words of scales that a thread of those who decode has read. Tiles begin with a word.
  struct Scales {
    typename Left::Scales a;
    typename Right::Scales b;
  };

  // Those of a step, where they are not those of the step before.
  TE_DIST_DEVICE void load_scales(const Cursor& step, const Right& right, Scales& scales) const {
    if (!step.exists()) return;
    if (step.step % Left::kStepsOfWord == 0) {
      Left::load_scales(p.a_scale, threadIdx.x - kMultipliers, step.tile.row, step.position_a(), scales.a);
    }
    if (step.step % Right::kStepsOfWord == 0) right.load_scales(p.b_scale, step.tile.b_row, step.position_b(), scales.b);
  }

  // One warp begins to read codes of A, another those of B.
  TE_DIST_DEVICE void decode_tiles() const {
    const int thread = threadIdx.x - kMultipliers, warp = thread / 32;
    const bool loads_a = warp == 1, loads_b = warp == 0;
    const Right right(thread);
    Cursor ahead(p), next(p);
    next.settle();
    if (loads_a || loads_b) {
      ahead.settle();
#pragma unroll 1
      for (int i = 0; i < (loads_a ? kCodeStagesA : kCodeStagesB); ++i) loads_a ? load_a(ahead, i) : load_b(ahead, i);
    }
    Scales read_ahead;
    load_scales(next, right, read_ahead);
    Ring<kStages> ring;
    Ring<kCodeStagesA> to_a;
    Ring<kCodeStagesB> from_b, to_b;
    for (int count = 0; next.exists(); ++count, ring.advance(), from_b.advance()) {
      const Scales scales = read_ahead;
      const int position = next.step * kStep;
      next.advance();
      load_scales(next, right, read_ahead);
      shared.b_full[from_b.stage].wait(from_b.parity);
      shared.empty[ring.stage].wait(ring.parity ^ 1);
      if (loads_a && count >= kStages) {  // this stage of values has been given up
        load_a(ahead, to_a.stage);
        to_a.advance();
      }
      Left::put_scales(shared.scales_a[ring.stage], thread, scales.a);
      right.decode(shared_address(shared.codes_b[from_b.stage]), scales.b, position, values(ring.stage));
      __syncwarp();
      if (thread % 32 == 0) {
        shared.full[ring.stage].arrive();
        shared.b_empty[from_b.stage].arrive();
      }
      if (loads_b && count > 0) {  // where the step before was decoded, so that the other warps have done so as well
        shared.b_empty[to_b.stage].wait(to_b.parity);
        load_b(ahead, to_b.stage);
        to_b.advance();
      }
    }
  }

  TE_DIST_DEVICE uint32_t values(int stage) const { return shared_address(shared.values[stage]); }

  using Sums = float[kWaves][kSums];

  TE_DIST_DEVICE void multiply_tiles() const {
    const Left left(threadIdx.x);
    Ring<kStages> ring;
    Ring<kCodeStagesA> codes;
    for (Cursor cursor(p); cursor.exists(); cursor.next_tile()) {
      Sums sums;
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[w][i] = 0.0f;
      }
      if (live_waves(cursor.tile) == kWaves) {
        sum<kWaves>(left, sums, cursor.steps, ring, codes);
      } else {
        sum<1>(left, sums, cursor.steps, ring, codes);
      }
      write(sums, cursor.tile);
    }
  }

  // Waves that have rows of the tile; at the end of a group, or of the matrix, one may have none.
  TE_DIST_INLINE int live_waves(const Tile& tile) {
    return Left::kTurned || tile.out_end - tile.out_row > kRows / 2 ? kWaves : 1;
  }

  // Sums of the first kLive waves. While the product of one is computed, the values of the next are decoded.
  template <int kLive>
  TE_DIST_DEVICE void sum(const Left& left, Sums& sums, int steps, Ring<kStages>& ring, Ring<kCodeStagesA>& codes) const {
    typename Left::Values values[kLive] = {};
    uint32_t previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance(), codes.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      shared.a_full[codes.stage].wait(codes.parity);
      // NOTE: by those who multiply. A fence of those who decode would wait for the scales they read ahead.
      fence_shared_for_async();
      const uint32_t from = shared_address(shared.codes_a[codes.stage]);
#pragma unroll
      for (int w = 0; w < kLive; ++w) {
        left.decode(from, shared.scales_a[ring.stage], step * kStep, w, values[w]);
        __syncwarp();
        multiply_wave(sums[w], values[w], ring.stage);
        wait_products<kLive - 1>();
        pin(sums[kLive - 1 - w]);
        hold(values[kLive - 1 - w]);
        if (w == 0 && step && kLive > 1) release(shared.empty[previous]);
      }
      previous = ring.stage;
      if (kLive == 1) release(shared.empty[previous]);
    }
    wait_products<0>();
#pragma unroll
    for (int w = 0; w < kLive; ++w) pin(sums[w]), hold(values[w]);
    if (steps && kLive > 1) release(shared.empty[previous]);
  }

  // Begins to add the four products of a wave.
  TE_DIST_DEVICE void multiply_wave(float (&sums)[kSums], typename Left::Values& first, uint32_t stage) const {
    const uint64_t second = operand_descriptor<B::kAlong>(values(stage));
    pin(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      multiply_by_16<kType, B::kAlong>(sums, first[i], second + i * kNextProduct<B::kAlong>, true);
    }
    commit_products();
    pin(sums);
  }

  // Keeps registers from being given to others before: tensor cores read them until they have been waited for.
  TE_DIST_INLINE void hold(typename Left::Values& values) {
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i) asm volatile("" : "+r"(values[i / 4][i % 4])::"memory");
  }

  TE_DIST_DEVICE void release(Barrier& empty) const {
    if (threadIdx.x % 32 == 0) empty.arrive();
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
    if (is_plain(tile) && p.out_type == kBFloat16) return write_plain<BFloat16>(sums, tile);
    if (is_plain(tile) && p.out_type == kFloat32) return write_plain<Float32>(sums, tile);
    write_any(sums, tile);
  }

  // Whether all columns of a tile exist, by fours, and rows and columns need nothing of their own.
  TE_DIST_DEVICE bool is_plain(const Tile& tile) const {
    const bool differ = p.bias || p.row_factor || p.a_factor.kept_stride || p.b_factor.kept_stride;
    return p.fours_fit && !differ && tile.col + kCols <= p.cols;
  }

  // With little to do for each value: the tensor cores wait meanwhile.
  template <class Element>
  TE_DIST_DEVICE void write_plain(const Sums& sums, const Tile& tile) const {
    constexpr int kBytes = 4 * Element::kBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, in_patch = lane % 8 * 4;
    const float by = float(p.constant) * kLeftOut * p.a_factor.of(0, tile.group), last = p.b_factor.of(0, tile.group);
    auto& patch = shared.patches[warp];
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
      char* rows[4];  // null: there is none
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = tile.out_row + Left::row_of(w, warp, lane / 8 + 4 * j);
        char* its = static_cast<char*>(p.out) + (row * p.pitch + tile.col + in_patch) * Element::kBytes;
        rows[j] = row < tile.out_end ? its : nullptr;
      }
#pragma unroll
      for (int i = 0; i < kCols; i += kPatchCols) {
        float4 there[4] = {};
        if (Element::kPerWord == 1 && p.adds) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (rows[j]) there[j] = *reinterpret_cast<const float4*>(rows[j] + i * Element::kBytes);
          }
        }
        put_patch(sums[w], i, patch);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 four = *reinterpret_cast<const float4*>(&patch[lane / 8 + 4 * j][in_patch]);
          const float values[4] = {four.x, four.y, four.z, four.w};
          const float olds[4] = {there[j].x, there[j].y, there[j].z, there[j].w};
          uint32_t words[4] = {};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float product = values[k] * by * last + 0.0f;  // no negative zero, as where a bias is added
            const float value = Element::kPerWord == 1 && p.adds ? olds[k] + product : product;
            words[k / Element::kPerWord] |= Element::store(value) << k % Element::kPerWord * 16;
          }
          if (rows[j]) store_words<kBytes>(rows[j] + i * Element::kBytes, words);
        }
      }
    }
  }

  TE_DIST_DEVICE void write_any(const Sums& sums, const Tile& tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& patch = shared.patches[warp];
#pragma unroll
    for (int i = 0; i < kCols; i += kPatchCols) {
      const int in_patch = lane % 8 * 4, col = tile.col + i + in_patch;
      const Columns its = columns(tile, col);
#pragma unroll
      for (int w = 0; w < kWaves; ++w) {
        put_patch(sums[w], i, patch);
#pragma unroll 1
        for (int row = lane / 8; row < 16; row += 4) {
          const int its_row = tile.out_row + Left::row_of(w, warp, row);
          if (its_row >= tile.out_end || its.count <= 0) continue;
          write_four(*reinterpret_cast<const float4*>(&patch[row][in_patch]), its, tile.group, its_row, col);
        }
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
