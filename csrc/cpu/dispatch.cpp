#include "dispatch.h"

#include <stdexcept>

namespace te_dist::cpu {

namespace portable {
extern const Kernels kKernels;
}
#if defined(TE_DIST_X86)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Level {
  const char* name;
  const Kernels* kernels;
};

std::vector<Level> available_levels() {
  std::vector<Level> levels{{"portable", &portable::kKernels}};
#if defined(TE_DIST_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2) levels.push_back({"avx2", &avx2::kKernels});
  if (avx2 && avx512) levels.push_back({"avx512", &avx512::kKernels});
#endif
  return levels;
}

const std::vector<Level>& levels() {
  static const std::vector<Level> instance = available_levels();
  return instance;
}

Level& current() {
  static Level instance = levels().back();
  return instance;
}

}  // namespace

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

std::string simd_level() { return current().name; }

void set_simd_level(const std::string& name) {
  for (const Level& level : levels()) {
    if (name == level.name) {
      current() = level;
      return;
    }
  }
  throw std::invalid_argument("no SIMD level '" + name + "' on this CPU; see simd_levels()");
}

const Kernels& kernels() { return *current().kernels; }

}  // namespace te_dist::cpu
