// Tensors as torch describes them in C: no call in Python, and nothing of torch to build with.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../host/dlpack_abi.h"

namespace te_dist {

// torch is never unloaded and keeps its interface for good.
inline const dlpack::Exchange& exchange() {
  static const dlpack::Exchange* const found = [] {
    const pybind11::capsule capsule = pybind11::module_::import("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
    dlpack::Header* header = capsule.get_pointer<dlpack::Header>();
    while (header && header->version.major != dlpack::kMajorVersion) header = header->previous;
    const auto* known = reinterpret_cast<const dlpack::Exchange*>(header);
    if (known && known->describe) return known;
    throw std::runtime_error("this torch does not describe its tensors by version " +
                             std::to_string(dlpack::kMajorVersion) + " of DLPack; te_dist needs torch 2.11 or later");
  }();
  return *found;
}

// False, without an exception in Python, for what is no tensor with a place in memory.
inline bool describe(PyObject* object, dlpack::Tensor* tensor) {
  if (exchange().describe(object, tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

inline uint64_t address_of(const dlpack::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

}  // namespace te_dist
