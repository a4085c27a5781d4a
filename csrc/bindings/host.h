#pragma once

#include <pybind11/pybind11.h>

namespace te_dist {

// Adds the submodule that loads and launches CUDA kernels.
void define_host(pybind11::module_& parent);

}  // namespace te_dist
