// A torch.Tensor as pointer, extents and strides, read through its Python attributes: nothing of torch is needed to
// build.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../cpu/types.h"

namespace te_dist {

// A tensor of up to two dimensions; one of fewer has leading extents 1 and strides 0. None has no data.
struct TensorRef {
  char* data = nullptr;
  cpu::DType dtype = cpu::DType::kOther;
  int64_t itemsize = 0;
  int64_t shape[2] = {1, 1};
  int64_t stride[2] = {0, 0};

  int64_t numel() const { return shape[0] * shape[1]; }

  cpu::Matrix matrix() const { return {data, dtype, shape[0], shape[1]}; }

  template <class T>
  T* pointer() const {
    return reinterpret_cast<T*>(data);
  }

  // A dimension of extent 1 in a (1, 1) or (m, 1) tensor that stands for all rows is read with stride 0.
  template <class T>
  cpu::Plane<T> plane() const {
    return {pointer<T>(), shape[0] == 1 ? 0 : stride[0], shape[1] == 1 ? 0 : stride[1]};
  }
};

// torch's dtype objects are singletons and torch is never unloaded, so they are compared by address.
inline cpu::DType dtype_of(pybind11::handle dtype) {
  struct Known {
    pybind11::handle float32, bfloat16, float16, uint8;
  };
  static const Known known = [] {
    const pybind11::module_ torch = pybind11::module_::import("torch");
    const auto address = [&](const char* name) { return pybind11::object(torch.attr(name)).release(); };
    return Known{address("float32"), address("bfloat16"), address("float16"), address("uint8")};
  }();
  if (dtype.is(known.float32)) return cpu::DType::kFloat32;
  if (dtype.is(known.bfloat16)) return cpu::DType::kBFloat16;
  if (dtype.is(known.float16)) return cpu::DType::kFloat16;
  return dtype.is(known.uint8) ? cpu::DType::kByte : cpu::DType::kOther;
}

inline TensorRef tensor_ref(pybind11::handle tensor) {
  TensorRef ref;
  const pybind11::tuple shape = tensor.attr("shape"), stride = tensor.attr("stride")();
  if (shape.size() > 2) throw pybind11::value_error("a kernel takes tensors of at most 2 dimensions");
  if (!tensor.attr("is_cpu").cast<bool>()) {
    throw pybind11::value_error("a CPU kernel got a tensor on " + pybind11::str(tensor.attr("device")).cast<std::string>() +
                                ", wanted all of them on the CPU; move it");
  }
  ref.data = reinterpret_cast<char*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  const pybind11::object dtype = tensor.attr("dtype");
  ref.dtype = dtype_of(dtype);
  ref.itemsize = dtype.attr("itemsize").cast<int64_t>();
  for (size_t i = 0; i < shape.size(); ++i) {
    const size_t dim = i + 2 - shape.size();
    ref.shape[dim] = shape[i].cast<int64_t>();
    ref.stride[dim] = stride[i].cast<int64_t>();
  }
  if (!ref.data && ref.numel()) {
    throw std::runtime_error(
        "a tensor of shape " + pybind11::repr(shape).cast<std::string>() +
        " has no memory, got a storage that was freed; a weight that FSDP2 gathers is there while its module runs: "
        "leave set_unshard_in_backward(True), or do not read it outside");
  }
  return ref;
}

}  // namespace te_dist

namespace pybind11::detail {

template <>
struct type_caster<te_dist::TensorRef> {
  PYBIND11_TYPE_CASTER(te_dist::TensorRef, const_name("torch.Tensor | None"));

  bool load(handle source, bool) {
    if (!source.is_none()) {
      if (!hasattr(source, "data_ptr")) return false;
      value = te_dist::tensor_ref(source);
    }
    return true;
  }
};

}  // namespace pybind11::detail
