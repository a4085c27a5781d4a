// Turns bytes in shared memory: what lies in rows comes to lie in columns. The tensor cores of sm_90 read FP8 only along
// what is summed over.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// A warp's part of turning tiles of 128 x 128 bytes in the 128-byte swizzle, see Rows128, in their place.
//
// Squares of 16 x 16 bytes, numbers (p, q) and (q, p), change places. A warp loads two of them as four matrices of 8 x 8
// pairs of bytes, transposed, whose rows are each half of a square's: lane l then has, of columns 2 (l / 4) and the next,
// two rows of each matrix. Four bytes of a column are put together, and stored as a part of a row. Which rows the halves
// have is chosen such that they lie in eight different banks, on both ways; hence the order of bytes differs by lane.
//
// Numbers of a square's row and column differ by some bits, in 8 ways; for each there are four pairs of squares, two for
// each warp. Of squares on the diagonal, which do not differ, two are a pair.
struct TileTurner {
  static constexpr int kWarps = 2;

  int warp;
  uint32_t load, store;    // where in square (0, 0) this lane's row lies, before and after
  uint32_t first, second;  // orders of bytes of either half
  uint32_t is_second;      // all bits, if this lane addresses the second square of a pair

  TE_DIST_INLINE TileTurner of(int warp) {
    const int lane = threadIdx.x % 32, half = lane / 8 % 2, n = lane % 8;
    const int row = n / 2 * 4 + n % 2 + (half ^ (n / 4)) * 2, col = n * 2 + (half ^ (n / 4));
    const uint32_t even = lane % 4 < 2 ? 0x6420 : 0x2064, odd = lane % 4 < 2 ? 0x7531 : 0x3175;
    const bool swaps = lane >= 16;
    return {warp, place(row), place(col), swaps ? odd : even, swaps ? even : odd, uint32_t(-(lane / 16))};
  }

  // `tile`: its address, a multiple of 1024.
  TE_DIST_DEVICE void turn(uint32_t tile) {
    // Places are computed anew for each tile: registers do not suffice to keep them.
    asm volatile("" : "+r"(load), "+r"(store), "+r"(is_second));
    uint32_t halves[kPairs][4];
#pragma unroll
    for (int n = 0; n < kPairs + kAhead; ++n) {
      if (n < kPairs) fetch(tile, n, halves[n]);
      if (n >= kAhead) put(tile, n - kAhead, halves[n - kAhead]);
    }
  }

 private:
  static constexpr int kOfWay = 4 / kWarps, kPairs = 8 * kOfWay, kAhead = 3;
  static constexpr uint32_t kDown = 2048, kAlong = 16;  // from a square to the next

  TE_DIST_INLINE uint32_t place(int row) { return row * 128 + row % 8 * 16; }

  // By which bits addresses of this lane in a square of pair `n` differ from those in square (0, 0): the square's row counts
  // `down`, its column `along`. Squares in a row are 16 bytes apart, which are swizzled; so bits are flipped, not added.
  TE_DIST_DEVICE uint32_t bits(int n, uint32_t down, uint32_t along) const {
    const int way = n / kOfWay, index = warp + n % kOfWay * kWarps;
    const int apart = way ? way : 4, below = apart >= 4 ? 3 : apart >= 2 ? 1 : 0;  // bits below the first that differs
    const int row = (index & ~below) << 1 | (index & below);
    return row * (down + along) ^ way * along ^ (is_second & apart * (down + along));
  }

  TE_DIST_DEVICE void fetch(uint32_t tile, int n, uint32_t (&halves)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(halves[0]), "=r"(halves[1]), "=r"(halves[2]), "=r"(halves[3])
                 : "r"(tile + (load ^ bits(n, kDown, kAlong)))
                 : "memory");
  }

  TE_DIST_DEVICE void put(uint32_t tile, int n, const uint32_t (&halves)[4]) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     tile + (store ^ bits(n, kAlong, kDown))),
                 "r"(__byte_perm(halves[0], halves[1], first)), "r"(__byte_perm(halves[0], halves[1], second)),
                 "r"(__byte_perm(halves[2], halves[3], first)), "r"(__byte_perm(halves[2], halves[3], second))
                 : "memory");
  }
};

}  // namespace te_dist::cuda
