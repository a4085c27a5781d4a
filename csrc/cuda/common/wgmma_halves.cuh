// Products of tiles of 16-bit values by the tensor cores of sm_90; sums lie in registers as wgmma.cuh says.
#pragma once

#include "wgmma.cuh"

namespace te_dist::cuda {

// What is multiplied.
enum class HalfType { kBFloat16, kFloat16 };

// Which dimension of an operand is contiguous: the one that is summed over, or the one that is kept.
enum class Along { kSummed, kKept };

// Descriptor of 64 summed values of some rows in the 128-byte swizzle, from an address that is a multiple of 1024.
// kSummed: as Rows128. kKept: blocks of 64 kept values, 8192 bytes apart, each of 64 rows of 128 bytes, one for every
// summed value.
template <Along kAlong>
TE_DIST_INLINE uint64_t operand_descriptor(uint32_t shared_address) {
  constexpr uint64_t kBlocks = kAlong == Along::kKept ? (8192 >> 4) << 16 : 0;
  constexpr uint32_t kOfBlock = (1 << 18) - 1;  // above stands which block of a cluster it is, and here the distance
  return Rows128::at(shared_address & kOfBlock).descriptor() | kBlocks;
}

// What takes a descriptor 16 summed values further.
template <Along kAlong>
constexpr uint64_t kNextProduct = (kAlong == Along::kSummed ? 32 : 16 * 128) >> 4;

#define TE_DIST_4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define TE_DIST_16(a, i) TE_DIST_4(a, i), TE_DIST_4(a, i + 4), TE_DIST_4(a, i + 8), TE_DIST_4(a, i + 12)
#define TE_DIST_64(a, i) TE_DIST_16(a, i), TE_DIST_16(a, i + 16), TE_DIST_16(a, i + 32), TE_DIST_16(a, i + 48)
#define TE_DIST_128(a, i) TE_DIST_64(a, i), TE_DIST_64(a, i + 64)
#define TE_DIST_64_NAMES \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63}"
#define TE_DIST_128_NAMES \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define TE_DIST_PRODUCT(width, count, type, a, b, with, turn_a, turn_b)                                       \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #with ", 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type "." type " " TE_DIST_##count##_NAMES \
               ", %" #a ", %" #b ", adds, 1, 1, %" #turn_a ", %" #turn_b ";\n}"                                \
               : TE_DIST_##count(sums, 0)                                                                     \
               : "l"(first), "l"(second), "r"(int(adds)), "n"(int(kFirst)), "n"(int(kSecond)))
#define TE_DIST_PRODUCTS(type)                             \
  if constexpr (kSums == 64) {                             \
    TE_DIST_PRODUCT(128, 64, type, 64, 65, 66, 67, 68);    \
  } else {                                                 \
    TE_DIST_PRODUCT(256, 128, type, 128, 129, 130, 131, 132); \
  }

// sums (64 x N) = first (64 x 16) second (N x 16)^T, plus `sums` where `adds`; N is twice the number of sums.
template <HalfType kType, Along kFirst, Along kSecond, int kSums>
TE_DIST_INLINE void multiply_by_16(float (&sums)[kSums], uint64_t first, uint64_t second, bool adds) {
  static_assert(kSums == 64 || kSums == 128, "a product is 128 or 256 wide");
  if constexpr (kType == HalfType::kFloat16) {
    TE_DIST_PRODUCTS("f16")
  } else {
    TE_DIST_PRODUCTS("bf16")
  }
}

#define TE_DIST_REGISTER_PRODUCT(type)                                                                               \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"                                                   \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " TE_DIST_64_NAMES                      \
               ", {%64, %65, %66, %67}, %68, adds, 1, 1, %70;\n}"                                                    \
               : TE_DIST_64(sums, 0)                                                                                 \
               : "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "l"(second), "r"(int(adds)), "n"(int(kSecond)))

// The same for N = 128, with a first operand in registers: of warp w and lane l the row 16 w + l / 4 in words 0 and 2, the
// row 8 further in words 1 and 3, in each word two neighbours: summed values from 2 (l % 4) on, and from 8 further on.
template <HalfType kType, Along kSecond>
TE_DIST_INLINE void multiply_by_16(float (&sums)[64], uint32_t (&first)[4], uint64_t second, bool adds) {
  if constexpr (kType == HalfType::kFloat16) {
    TE_DIST_REGISTER_PRODUCT("f16");
  } else {
    TE_DIST_REGISTER_PRODUCT("bf16");
  }
}

#undef TE_DIST_REGISTER_PRODUCT
#undef TE_DIST_PRODUCTS
#undef TE_DIST_PRODUCT
#undef TE_DIST_128_NAMES
#undef TE_DIST_64_NAMES
#undef TE_DIST_128
#undef TE_DIST_64
#undef TE_DIST_16
#undef TE_DIST_4

}  // namespace te_dist::cuda
