// Products of groups of rows, or of what groups sum over, without scales on the way: of bf16, of fp16, or of FP8 with one
// scale for a matrix or for each group of it.
//
// The tensor cores sum from beginning to end, or the values of a stage at a time: of FP8 they keep 14 bits of a sum, and
// its error grows with what is summed; sums of 128 values are added in fp32, by one consumer while the other keeps the
// tensor cores busy.
//
// One block of threads stays on each multiprocessor and walks over tiles of 128 rows of the product. Of a warpgroup of
// producers a warp finds the tiles, and a thread fills a ring of stages by the bulk copy engine; two warpgroups of consumers
// multiply, 64 rows each. While one of them writes its sums, the other keeps the tensor cores busy, and the producer reads
// for the next tile.
#pragma once

#include "common/epilogue.cuh"
#include "common/group_tiles.cuh"
#include "common/persistent.cuh"

namespace te_dist::cuda {

// Of one type, which lies one way.
template <class Element_, Along kAlong_>
struct Operand {
  using Element = Element_;
  static constexpr Along kAlong = kAlong_;
};

template <class Element>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<BFloat16> = true;
template <>
constexpr bool kIsHalf<Float16> = true;

// Walk: which tiles there are, see common/group_tiles.cuh. A, B: operands; FP8 lies along what is summed over.
// kSumsInParts: whether sums of a stage are added in fp32 registers.
// kCols: of a tile; 128 or 256, in parts 128 or 192. kCluster: blocks one below the other along the rows that read B once for all, 1 or 2.
// kAdds: adds to what `out` holds.
template <template <class> class Walk, class A, class B, class Out, bool kSumsInParts, int kCols, int kCluster, int kStages,
          bool kAdds>
struct GroupedGemm {
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers), kBlocks = 1;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kRows = 64 * kConsumers, kSums = kCols / 2;  // of a tile; by thread
  static constexpr bool kAreHalves = kIsHalf<typename A::Element>;
  static constexpr int kDepth = kAreHalves ? 64 : 128;  // summed over in a stage, 128 bytes
  static constexpr bool kIsCut = A::kAlong == Along::kKept || B::kAlong == Along::kKept;
  static constexpr uint32_t kStageBytes = (kRows + kCols) * 128, kBlockBytes = 64 * 128;
  using Tiles = Walk<GroupTileShape<kRows, kCols, kCluster, A::kAlong, B::kAlong>>;
  static_assert(kAreHalves || !kIsCut, "the tensor cores turn halves alone");
  static_assert(!kSumsInParts || (!kAreHalves && kCols <= 192), "registers hold no more parts beside sums");
  // Whether the code of a stage knows its place in shared memory; of many stages registers do not suffice for that.
  static constexpr bool kKnowsStages = kStages <= 4;
  // Of the output, that a consumer writes at a time: of small tiles that are added, half, since all of what they are added to
  // is held beside the stages.
  static constexpr int kBoxesInTurn = kAdds && kCols == 128 ? kCols * Out::kBytes / 256 : 1;

  struct Params {
    TensorMap a, b, out;
    const void* bias;         // (groups, cols)
    const float* row_factor;  // of each row of the output, which it is multiplied by; or null
    void* out_data;
    int64_t out_stride;
    int32_t bias_type;
    int32_t cols;
    int32_t has_map;  // whether the copy engine can write `out`
    int32_t a_scale_step, b_scale_step;  // from group to group
    const float* a_scale;  // of FP8
    const float* b_scale;
    typename Tiles::Params tiles;
  };

  static constexpr int kParts = 1, kPreparers = 0;
  using Roles = Persistent<GroupedGemm, GroupTile, kConsumers, kCluster, kStages>;
  using Output = Epilogue<Params, Out, kConsumers, 1, kCols, kBoxesInTurn, kAdds>;

  struct Shared {
    alignas(1024) uint8_t a[kStages][kRows * 128];
    alignas(1024) uint8_t b[kStages][kCols * 128];
    alignas(1024) typename Output::Buffer out[kConsumers];
    NextTile<GroupTile> next;
    GroupTile tile[kStages];  // that begins with the stage
    Barrier full[kStages][kParts], empty[kStages][kParts];
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
  TE_DIST_INLINE int stages_of(const GroupTile& t) { return t.count > 0 ? (t.count + kDepth - 1) / kDepth : 1; }

  // Reads what a stage holds of an operand; of one that all blocks of a cluster multiply by, each reads its share for all.
  template <class Read, int kExtent, int kSharers>
  TE_DIST_DEVICE void fetch(const TensorMap& map, Barrier& full, uint8_t* target, int kept, int summed) const {
    constexpr bool kIsTurned = Read::kAlong == Along::kKept;
    constexpr int kShare = kExtent / kSharers, kBox = kIsTurned ? 64 : kShare;
    const int own = kSharers > 1 ? int(block) * kShare : 0;
#pragma unroll
    for (int i = own; i < own + kShare; i += kBox) {
      const int x = kIsTurned ? kept + i : summed, y = kIsTurned ? summed : kept + i;
      if constexpr (kSharers > 1) {
        copy_box_to_many(map, full, target + i * 128, x, y, (1 << kSharers) - 1);
      } else {
        copy_box(map, full, target + i * 128, x, y);
      }
    }
  }

  // Begins to fill stage number `k` of a tile. One thread does.
  TE_DIST_DEVICE void read(const GroupTile& t, uint32_t s, int k, int) const {
    Barrier& full = shared.full[s][0];
    if (t.count > 0) {
      const int further = k * kDepth;
      fetch<A, kRows, 1>(p.a, full, shared.a[s], t.a_kept, t.a_first + further);
      fetch<B, kCols, kCluster>(p.b, full, shared.b[s], t.b_kept, t.b_first + further);
      Output::prefetch(p, t, k, stages_of(t));
    }
    full.expect(t.count > 0 ? kStageBytes : 0);
  }

  struct Consumer {
    const GroupedGemm& gemm;
    int group;  // which consumer
    float sums[1][kSums];
    Output output;

    TE_DIST_DEVICE Shared& shared() const { return gemm.shared; }

    // Zeros for all but the first `valid` of the values that are summed over, in blocks of 64 that are kept.
    TE_DIST_DEVICE void clear_behind(int valid, uint8_t* blocks, int count) const {
      for (int i = 0; i < count; ++i) {
        for (int at = valid * 128 + threadIdx.x % 128 * 16; at < int(kBlockBytes); at += 128 * 16) {
          *reinterpret_cast<uint4*>(blocks + i * kBlockBytes + at) = make_uint4(0, 0, 0, 0);
        }
      }
    }

    // Rows behind the last that is summed over are another group's, or anything: not even a NaN of theirs may matter. What
    // both consumers read both clear, and neither waits for the other.
    TE_DIST_DEVICE void cut(int stage, int valid) const {
      if (valid >= kDepth) return;
      if constexpr (A::kAlong == Along::kKept) clear_behind(valid, shared().a[stage] + group * kBlockBytes, 1);
      if constexpr (B::kAlong == Along::kKept) clear_behind(valid, shared().b[stage], kCols / 64);
      fence_shared_for_async();
      sync_threads(1 + group, 128);
    }

    // Begins to sum over the values of a stage; into what `into` holds, where sums are not in parts.
    TE_DIST_DEVICE void multiply(float (&into)[kSums], int stage) const {
      const uint32_t a = shared_address(shared().a[stage]) + group * kBlockBytes, b = shared_address(shared().b[stage]);
      pin(into);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kAreHalves) {
          constexpr HalfType kType = A::Element::kIsTopHalf ? HalfType::kBFloat16 : HalfType::kFloat16;
          multiply_by_16<kType, A::kAlong, B::kAlong>(into, operand_descriptor<A::kAlong>(a) + k * kNextProduct<A::kAlong>,
                                                      operand_descriptor<B::kAlong>(b) + k * kNextProduct<B::kAlong>,
                                                      true);
        } else {
          const Rows128 first = Rows128::at(a).template further<32>(k), second = Rows128::at(b).template further<32>(k);
          multiply_64xNx32<typename A::Element, typename B::Element>(into, first, second, !kSumsInParts || k > 0);
        }
      }
      commit_products();
      pin(into);
    }

    TE_DIST_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] = 0.0f;
    }

    // While the products of a stage are summed, those of the next are begun.
    TE_DIST_DEVICE void sum_tile(const GroupTile& t, Ring<kStages>& ring) {
      clear();
      int previous = 0;
      for (int k = 0, end = stages_of(t); k < end; ++k, ring.advance()) {
        shared().full[ring.stage][0].wait(ring.parity);
        if constexpr (kIsCut) {
          if (k == end - 1) cut(ring.stage, t.count - k * kDepth);
        }
        multiply(sums[0], ring.stage);
        if (kAdds && k == end / 2) output.fetch(t);  // what was written before has been read by then
        if (k > 0) {
          wait_products<1>();
          Roles::release(shared().empty[previous][0]);
        }
        previous = ring.stage;
      }
      wait_products<0>();
      pin(sums[0]);
      Roles::release(shared().empty[previous][0]);
    }

    // Waits for the sums of stage number `k` of a tile, begins those of the next, and adds. What leads from the end of a
    // product to the next is as short as it can be, since the tensor cores have no more to do for this consumer meanwhile.
    TE_DIST_DEVICE void add_stage(const GroupTile& t, float (&part)[kSums], int stage, int k, Ring<kStages>& ring) {
      const int end = stages_of(t);
      const bool is_last = k == end - 1;
      if (kAdds && k == end / 2) output.fetch(t);
      ring.advance();
      if (!is_last) shared().full[ring.stage][0].wait(ring.parity);
      wait_products<0>();
      pin(part);
      Roles::release(shared().empty[stage][0]);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] += part[i];
      if (!is_last) multiply(part, kKnowsStages ? (stage + 1) % kStages : int(ring.stage));
    }

    // Sums of the values of every stage are added in fp32.
    TE_DIST_DEVICE void sum_parts(const GroupTile& t, Ring<kStages>& ring) {
      clear();
      float part[kSums];
      const int end = stages_of(t);
      multiply(part, ring.stage);
      if constexpr (kKnowsStages) {
        for (int k = -int(ring.stage); k < end; k += kStages) {
#pragma unroll
          for (int stage = 0; stage < kStages; ++stage) {
            if (k + stage >= 0 && k + stage < end) add_stage(t, part, stage, k + stage, ring);
          }
        }
      } else {
        for (int k = 0; k < end; ++k) add_stage(t, part, ring.stage, k, ring);
      }
    }

    // A tile that has nothing to sum, or no rows of this consumer.
    TE_DIST_DEVICE void pass_over(const GroupTile& t, Ring<kStages>& ring) {
      clear();
      for (int k = 0, end = stages_of(t); k < end; ++k, ring.advance()) {
        shared().full[ring.stage][0].wait(ring.parity);
        __syncwarp();
        Roles::release(shared().empty[ring.stage][0]);
      }
    }

    TE_DIST_DEVICE float scale_of(const GroupTile& t) const {
      const Params& p = gemm.p;
      return __ldg(p.a_scale + t.group * p.a_scale_step) * __ldg(p.b_scale + t.group * p.b_scale_step);
    }

    TE_DIST_DEVICE void compute(const GroupTile& t, Ring<kStages>& ring) {
      const float scale = kAreHalves ? 1.0f : scale_of(t);
      const bool has_rows = t.out_row + group * 64 < t.out_end;
      if (t.count > 0 && has_rows) {
        if constexpr (kSumsInParts) {
          sum_parts(t, ring);
        } else {
          sum_tile(t, ring);
        }
      } else {
        pass_over(t, ring);
      }
      if (!has_rows || (kAdds && t.count == 0)) return;
      if constexpr (!kAreHalves) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] *= scale;
      }
      if constexpr (Tiles::kHasBias) output.finish(t, sums);
      output.write(t, sums);
    }
  };

  TE_DIST_DEVICE Consumer consumer(int group) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, col = lane % 4 * 2;
    return {*this, group, {}, Output{p, shared.out[group], &shared.held[group], group, row, col, 0}};
  }
};

}  // namespace te_dist::cuda
