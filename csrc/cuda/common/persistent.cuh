// Products whose blocks of threads stay on their multiprocessors and walk over tiles: a warp reads, warpgroups compute.
#pragma once

#include "pipeline.cuh"

namespace te_dist::cuda {

// Runs a product, whose members are its parameters `p`, its `shared` memory, and the number of its `block` in the
// cluster. It says
// - which Tiles there are, and how many registers producer and consumers need;
// - what is Shared: for each stage of a ring what it holds, the `tile` that begins with it, barriers `full`, `empty`;
// - init_barriers(): of others than those, by one thread;
// - stages_of(tile), and read(tile, stage, k): begins to fill a stage, number k of the tile, by one thread;
// - consumer(group): of a warpgroup, whose compute(tile, ring) finds the tile's first stage full, waits for the others,
//   releases all, and stores.
template <class Product, class Tile, int kConsumers, int kCluster, int kStages>
struct Persistent {
  const Product& product;

  TE_DIST_DEVICE int first_tile() const { return blockIdx.x / kCluster; }
  TE_DIST_DEVICE int tile_step() const { return gridDim.x / kCluster; }

  // One lane says that all of its warp have read, which have come together: to all blocks of the cluster, which write.
  TE_DIST_INLINE void release(Barrier& empty) {
    const int lane = threadIdx.x % 32;
    if constexpr (kCluster > 1) {
      if (lane < kCluster) empty.arrive_at(lane);
    } else {
      if (lane == 0) empty.arrive();
    }
  }

  TE_DIST_DEVICE void init_barriers() const {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      product.shared.full[s].init(1);
      product.shared.empty[s].init(kCluster * kConsumers * 4);
    }
    product.init_barriers();
    fence_barrier_init();
  }

  TE_DIST_DEVICE void fill(const Tile& t, Ring<kStages>& ring) const {
#pragma unroll 1
    for (int k = 0, end = product.stages_of(t); k < end; ++k, ring.advance()) {
      product.shared.empty[ring.stage].wait(ring.parity ^ 1);
      if (k == 0) product.shared.tile[ring.stage] = t;
      product.read(t, ring.stage, k);
    }
  }

  // All lanes of a warp find the tiles, ahead of those who compute them.
  TE_DIST_DEVICE void produce() const {
    const typename Product::Tiles tiles{product.p.tiles};
    Ring<kStages> ring;
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step()) {
      const Tile t = tiles.at(index, product.block);
      if (elect()) fill(t, ring);
      __syncwarp();
    }
  }

  TE_DIST_DEVICE void consume(int group) const {
    const typename Product::Tiles tiles{product.p.tiles};
    Ring<kStages> ring;
    typename Product::Consumer consumer = product.consumer(group);
    for (int index = first_tile(), end = tiles.count(); index < end; index += tile_step()) {
      product.shared.full[ring.stage].wait(ring.parity);
      const Tile t = product.shared.tile[ring.stage];
      consumer.compute(t, ring);
    }
    if (threadIdx.x % 128 == 0) wait_stores();
  }

  TE_DIST_INLINE void sync_blocks() {
    if constexpr (kCluster > 1) {
      sync_cluster();
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
    sync_blocks();
    const int group = __shfl_sync(0xFFFFFFFFu, int(threadIdx.x), 0) / 128;
    if (group == kConsumers) {
      give_registers<Product::kProducerRegisters>();
      if (threadIdx.x < 128 * kConsumers + 32) walk.produce();
    } else {
      take_registers<Product::kConsumerRegisters>();
      walk.consume(group);
    }
    // Blocks of a cluster write into each other's shared memory: none may end before the others have.
    if constexpr (kCluster > 1) sync_cluster();
  }
};

}  // namespace te_dist::cuda
