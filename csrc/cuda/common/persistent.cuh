// Products whose blocks of threads stay on their multiprocessors and walk over tiles: one warp finds them, one reads what
// they need, two may prepare that, warpgroups compute.
#pragma once

#include "pipeline.cuh"

namespace te_dist::cuda {

// A tile on its way from the warp that finds it to the thread that reads for it.
template <class Tile>
struct NextTile {
  Tile tile;
  Barrier found, taken;
};

// Runs a product, whose members are its parameters `p`, its `shared` memory, and the number of its `block` in the
// cluster. It says
// - which Tiles there are, and how many registers producer and consumers need;
// - kParts: of a stage, which are read, and given up, one after the other. Who gives up the first has read the `tile`;
// - kPreparers: warps, none or two, that work on what was read before consumers see it. Of each stage they wait for a
//   barrier `raw` of Shared; prepare(stage, warp) is what a warp does;
// - what is Shared: the `next` tile; for each stage of a ring what it holds, the `tile` that begins with it, barriers
//   `full`, `empty` for each part;
// - init_barriers(): of others than those, by one thread;
// - stages_of(tile), and read(tile, stage, k, part): begins to fill a part of a stage, number k of the tile, by one thread;
// - consumer(group): of a warpgroup, whose compute(tile, ring) finds the first part of the tile's first stage full, waits for
//   the others, releases all, and stores.
template <class Product, class Tile, int kConsumers, int kCluster, int kStages>
struct Persistent {
  const Product& product;

  TE_DIST_DEVICE int first_tile() const { return blockIdx.x / kCluster; }
  TE_DIST_DEVICE int tile_step() const { return gridDim.x / kCluster; }

  // One lane says that all of its warp have read, which have come together: to all blocks of the cluster, which write. Of
  // several blocks it says so to one after the other: lanes that each told one would have to know their number, for which
  // no register is left while products are computed.
  TE_DIST_INLINE void release(Barrier& empty) {
    if constexpr (kCluster == 1) {
      if (threadIdx.x % 32 == 0) empty.arrive();
    } else if (elect()) {
#pragma unroll
      for (int block = 0; block < kCluster; ++block) empty.arrive_at(block);
    }
  }

  TE_DIST_DEVICE void init_barriers() const {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
#pragma unroll
      for (int part = 0; part < Product::kParts; ++part) {
        product.shared.full[s][part].init(1 + (part == 0 ? Product::kPreparers : 0));
        product.shared.empty[s][part].init(kCluster * kConsumers * 4);
      }
      if constexpr (Product::kPreparers > 0) product.shared.raw[s].init(1);
    }
    product.shared.next.found.init(1);
    product.shared.next.taken.init(1);
    product.init_barriers();
    fence_barrier_init();
  }

  // All lanes of a warp find the tiles, one ahead of the thread that reads: of many groups it takes as long as some stages.
  TE_DIST_DEVICE void find() const {
    const typename Product::Tiles tiles{product.p.tiles};
    auto& next = product.shared.next;
    uint32_t parity = 1;
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step(), parity ^= 1) {
      const Tile t = tiles.at(index, product.block);
      if (elect()) {
        next.taken.wait(parity);
        next.tile = t;
        next.found.arrive();
      }
      __syncwarp();
    }
  }

  // One thread reads for all tiles.
  TE_DIST_DEVICE void read() const {
    const typename Product::Tiles tiles{product.p.tiles};
    auto& next = product.shared.next;
    Ring<kStages> ring;
    uint32_t parity = 0;
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step(), parity ^= 1) {
      next.found.wait(parity);
      product.shared.empty[ring.stage][0].wait(ring.parity ^ 1);
      const Tile t = next.tile;
      product.shared.tile[ring.stage] = t;
      next.taken.arrive();
#pragma unroll 1
      for (int k = 0, stages = product.stages_of(t); k < stages; ++k, ring.advance()) {
#pragma unroll
        for (int part = 0; part < Product::kParts; ++part) {
          if (k > 0 || part > 0) product.shared.empty[ring.stage][part].wait(ring.parity ^ 1);
          product.read(t, ring.stage, k, part);
        }
      }
    }
    if constexpr (kCluster > 1) await_all(ring);
  }

  // Blocks of a cluster arrive at each other's barriers, and copy into each other's memory: none may end before that is done.
  // A stage is given up, in all blocks, by the consumers of all blocks, who have seen it full. `ring`: behind the last that
  // was read.
  TE_DIST_DEVICE void await_all(Ring<kStages> ring) const {
#pragma unroll 1
    for (int s = 0; s < kStages; ++s, ring.advance()) {
#pragma unroll
      for (int part = 0; part < Product::kParts; ++part) product.shared.empty[ring.stage][part].wait(ring.parity ^ 1);
    }
  }

  TE_DIST_DEVICE void prepare(int warp) const {
    const typename Product::Tiles tiles{product.p.tiles};
    Ring<kStages> ring;
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step()) {
      product.shared.raw[ring.stage].wait(ring.parity);
#pragma unroll 1
      for (int k = 0, stages = product.stages_of(product.shared.tile[ring.stage]); k < stages; ++k, ring.advance()) {
        if (k > 0) product.shared.raw[ring.stage].wait(ring.parity);
        __syncwarp();  // its lanes prepare together
        product.prepare(ring.stage, warp);
        __syncwarp();
        if (threadIdx.x % 32 == 0) product.shared.full[ring.stage][0].arrive();
      }
    }
  }

  // `warp`: of the warpgroup of producers.
  TE_DIST_DEVICE void produce(int warp) const {
    if (warp == 0) {
      if (elect()) read();
      __syncwarp();
    } else if (warp == 1) {
      find();
    } else if constexpr (Product::kPreparers > 0) {
      prepare(warp - 2);
    }
  }

  TE_DIST_DEVICE void consume(int group) const {
    const typename Product::Tiles tiles{product.p.tiles};
    Ring<kStages> ring;
    typename Product::Consumer consumer = product.consumer(group);
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step()) {
      product.shared.full[ring.stage][0].wait(ring.parity);
      const Tile t = product.shared.tile[ring.stage];
      consumer.compute(t, ring);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }

  // All threads of the cluster see the barriers.
  TE_DIST_INLINE void meet() {
    if constexpr (kCluster > 1) {
      meet_cluster();
    } else {
      __syncthreads();
    }
  }

  TE_DIST_INLINE void run(const typename Product::Params& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto& shared = *reinterpret_cast<typename Product::Shared*>(memory);
    const Product product{p, shared, kCluster > 1 ? block_of_cluster() : 0};
    const Persistent walk{product};
    if (threadIdx.x == 0) walk.init_barriers();
    meet();
    const int warp = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x), 0) / 32, group = warp / 4;
    if (group == kConsumers) {
      give_registers<Product::kProducerRegisters>();
      walk.produce(warp % 4);
    } else {
      take_registers<Product::kConsumerRegisters>();
      walk.consume(group);
    }
  }
};

}  // namespace te_dist::cuda
