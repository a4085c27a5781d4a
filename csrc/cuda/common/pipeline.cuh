// What a pipeline of copies and matrix products is made of on sm_90: barriers in shared memory, the bulk copy engine,
// clusters, and registers that move from those who copy to those who compute.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// A tensor map of the bulk copy engine, encoded by the host.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

TE_DIST_INLINE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

template <int kRegisters>
TE_DIST_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
TE_DIST_INLINE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Whether this is the one lane of its warp, which has come together, that is to give commands to the copy engine. Of a
// branch on it the compiler knows that there is one thread, and so makes no loop over threads of each command.
TE_DIST_INLINE bool elect() {
  uint32_t is_elected;
  asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, elected;\n}" : "=r"(is_elected));
  return is_elected != 0;
}

// Waits for `threads` of the block that name the same barrier, 1 to 15.
TE_DIST_INLINE void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes what this thread wrote into shared memory visible to tensor cores and the bulk copy engine.
TE_DIST_INLINE void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Two values at an address in shared memory.
TE_DIST_INLINE float2 load_shared_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}

TE_DIST_INLINE void store_shared_pair(uint32_t address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y) : "memory");
}

// A barrier in shared memory. A phase ends when all arrivals and all announced bytes have come in.
struct Barrier {
  uint64_t word;

  TE_DIST_DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
  }

  TE_DIST_DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }

  // Arrives at the barrier in the same place of another block of the cluster, or of this one.
  TE_DIST_DEVICE void arrive_at(uint32_t block) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(&word)),
        "r"(block)
        : "memory");
  }

  // Arrives, and announces bytes that the bulk copy engine will write.
  TE_DIST_DEVICE void expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }

  // Waits for the end of the phase of this parity. A thread sleeps until then, or for a millisecond before it asks again;
  // without that hint it asks sooner, which takes issue slots from others.
  TE_DIST_DEVICE void wait(uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 1000000;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
  }
};

// Makes initialized barriers visible to the copy engine and to other blocks.
TE_DIST_INLINE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Place in a ring of kStages buffers, and the parity of its barriers' current phase.
template <int kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t parity = 0;

  TE_DIST_DEVICE void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

TE_DIST_INLINE uint32_t block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of all blocks of the cluster; behind it barriers are seen that were initialized before
// fence_barrier_init.
TE_DIST_INLINE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies the box at (x, y) of a matrix, x along its contiguous dimension, into shared memory.
TE_DIST_INLINE void copy_box(const TensorMap& map, Barrier& barrier, void* target, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y)
      : "memory");
}

// The same into the blocks of the cluster whose bits are set, at the same place in each, arriving at each one's barrier.
TE_DIST_INLINE void copy_box_to_many(const TensorMap& map, Barrier& barrier, void* target, int x, int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// Brings the box at (x, y) of a matrix into the L2 cache.
TE_DIST_INLINE void prefetch_box(const TensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}

// Copies a box from an address in shared memory, or adds it to what is there; what lies outside of the matrix is left out.
template <bool kAdds>
TE_DIST_INLINE void store_box(const TensorMap& map, uint32_t source, int x, int y) {
  if constexpr (kAdds) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Counts as a store where there is none, so that those before it can be told by their number.
TE_DIST_INLINE void skip_store() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all stores of this thread, but for the latest kPending, have read their shared memory.
template <int kPending>
TE_DIST_INLINE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace te_dist::cuda
