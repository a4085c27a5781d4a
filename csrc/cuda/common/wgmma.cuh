// Products of tiles by the tensor cores of sm_90: one instruction of a warpgroup (128 threads).
//
// Of a 64 x N product a thread holds N / 2 values: of warp w and lane l the rows 16 w + l / 4 and 8 further, in values
// 4 j to 4 j + 3 the columns 8 j + 2 (l % 4) and the next, of the first row and then of the second.
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// Before the first product that reads registers or shared memory written by this thread.
TE_DIST_INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TE_DIST_INLINE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the latest kPending groups are done.
template <int kPending>
TE_DIST_INLINE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators over a fence or wait.
template <int kCount>
TE_DIST_INLINE void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// An operand in shared memory: rows of 128 bytes, summed over along the row, in the 128-byte swizzle. Rows lie in atoms of
// 8, 1024 bytes apart, which the first address is a multiple of.
struct Rows128 {
  uint32_t place;  // in units of 16 bytes

  TE_DIST_INLINE Rows128 at(uint32_t shared_address) { return {shared_address >> 4}; }
  // Further by `count` times a number of bytes, along rows or from row to row.
  template <uint32_t kBytes>
  TE_DIST_DEVICE Rows128 further(uint32_t count) const {
    return {place + count * (kBytes / 16)};
  }

  TE_DIST_DEVICE uint64_t descriptor() const {
    constexpr uint32_t kSwizzle128 = 1u << 30, kAtoms = 1024 >> 4;
    return uint64_t(kSwizzle128 | kAtoms) << 32 | place;
  }
};

#define TE_DIST_8(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
                        "+f"(a[i + 6]), "+f"(a[i + 7])
#define TE_DIST_32(a, i) TE_DIST_8(a, i), TE_DIST_8(a, i + 8), TE_DIST_8(a, i + 16), TE_DIST_8(a, i + 24)
#define TE_DIST_64_NAMES                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TE_DIST_96_NAMES                                                                                            \
  TE_DIST_64_NAMES ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
                   "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TE_DIST_128_NAMES                                                                                          \
  TE_DIST_96_NAMES ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                   "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define TE_DIST_PRODUCT(shape, types, names, a_name, b_name, adds_name, ...)                                     \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_name ", 0;\n"                                       \
               "wgmma.mma_async.sync.aligned." shape ".f32." types " {" names "}, " a_name ", " b_name ", adds, 1, 1;\n}" \
               : __VA_ARGS__                                                                                     \
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"(int(adds)))
#define TE_DIST_PRODUCTS(shape, names, a_name, b_name, adds_name, ...)                       \
  constexpr bool kA43 = A::kShift == E4M3::kShift, kB43 = B::kShift == E4M3::kShift;          \
  if constexpr (kA43 && kB43) {                                                              \
    TE_DIST_PRODUCT(shape, "e4m3.e4m3", names, a_name, b_name, adds_name, __VA_ARGS__);       \
  } else if constexpr (kA43) {                                                               \
    TE_DIST_PRODUCT(shape, "e4m3.e5m2", names, a_name, b_name, adds_name, __VA_ARGS__);       \
  } else if constexpr (kB43) {                                                               \
    TE_DIST_PRODUCT(shape, "e5m2.e4m3", names, a_name, b_name, adds_name, __VA_ARGS__);       \
  } else {                                                                                   \
    TE_DIST_PRODUCT(shape, "e5m2.e5m2", names, a_name, b_name, adds_name, __VA_ARGS__);       \
  }

// sums (64 x N) = a (64 x 32) b (N x 32)^T, plus `sums` where `adds`; N is twice as many as there are sums.
template <class A, class B>
TE_DIST_INLINE void multiply_64xNx32(float (&sums)[64], Rows128 a, Rows128 b, bool adds) {
  TE_DIST_PRODUCTS("m64n128k32", TE_DIST_64_NAMES, "%64", "%65", "%66", TE_DIST_32(sums, 0), TE_DIST_32(sums, 32))
}

template <class A, class B>
TE_DIST_INLINE void multiply_64xNx32(float (&sums)[96], Rows128 a, Rows128 b, bool adds) {
  TE_DIST_PRODUCTS("m64n192k32", TE_DIST_96_NAMES, "%96", "%97", "%98", TE_DIST_32(sums, 0), TE_DIST_32(sums, 32),
                   TE_DIST_32(sums, 64))
}

template <class A, class B>
TE_DIST_INLINE void multiply_64xNx32(float (&sums)[128], Rows128 a, Rows128 b, bool adds) {
  TE_DIST_PRODUCTS("m64n256k32", TE_DIST_128_NAMES, "%128", "%129", "%130", TE_DIST_32(sums, 0), TE_DIST_32(sums, 32),
                   TE_DIST_32(sums, 64), TE_DIST_32(sums, 96))
}

#undef TE_DIST_PRODUCTS
#undef TE_DIST_PRODUCT
#undef TE_DIST_128_NAMES
#undef TE_DIST_96_NAMES
#undef TE_DIST_64_NAMES
#undef TE_DIST_32
#undef TE_DIST_8

}  // namespace te_dist::cuda
