// Chooses the kernels for the CPU at hand.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace te_dist::cpu {

// Names of the SIMD levels this CPU can run, the slowest first.
std::vector<std::string> simd_levels();

std::string simd_level();

// Kernels of another level from now on; for tests and benchmarks. Throws std::invalid_argument for an unknown level.
void set_simd_level(const std::string& name);

const Kernels& kernels();

}  // namespace te_dist::cpu
