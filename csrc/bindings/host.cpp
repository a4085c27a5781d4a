// te_dist._C.cuda: loads and launches compiled kernels, and products of cuBLASLt.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#include "../host/kernel.h"
#include "../host/product.h"
#include "../host/program.h"
#include "described.h"
#include "host.h"

namespace py = pybind11;

namespace te_dist {
namespace {

using Grid = std::array<unsigned, 3>;

std::unique_ptr<LoadedKernel> load(const py::bytes& cubin, const std::string& entry, const std::string& label,
                                   unsigned cluster, unsigned shared_bytes, bool overlaps) {
  return std::make_unique<LoadedKernel>(std::string(cubin), entry, label, LaunchShape{cluster, shared_bytes, overlaps});
}

// See ProductSpec.
std::unique_ptr<Product> product(const std::string& library, int device, std::array<int64_t, 3> extents,
                                 std::array<int64_t, 3> pitches, std::array<std::string, 4> types,
                                 std::array<uint32_t, 4> alignments, bool fast, bool accumulate,
                                 uint64_t workspace_bytes, std::array<bool, 2> turned) {
  const ProductSpec spec{extents,    pitches,         std::move(types), alignments, fast,
                         accumulate, workspace_bytes, turned};
  return std::make_unique<Product>(library, device, spec);
}

// Every argument is a bytes object with one parameter, as it lies in memory.
void launch(Launchable& launched, int device, uint64_t stream, Grid grid, const py::args& arguments) {
  std::vector<void*> pointers;
  pointers.reserve(arguments.size());
  for (const py::handle argument : arguments) pointers.push_back(PyBytes_AS_STRING(argument.ptr()));
  const py::gil_scoped_release release;
  launched.launch(device, stream, grid, pointers);
}

// What is launched, grid, parameters, and the members of each Patch.
using Step = std::tuple<py::object, Grid, py::bytes, std::vector<std::tuple<size_t, size_t, uint64_t, bool>>>;

// A program that keeps what it launches, and takes its addresses from tensors.
class KeptProgram {
 public:
  // `places`: by slot, which of the tensors of a run has the address.
  KeptProgram(std::vector<Step> steps, std::vector<size_t> places) : program_(launches(steps)), places_(std::move(places)) {
    for (Step& step : steps) launched_.push_back(std::move(std::get<0>(step)));
  }

  void run(int device, uint64_t stream, const py::list& tensors) {
    std::vector<uint64_t> addresses;
    addresses.reserve(places_.size());
    for (const size_t place : places_) {
      dlpack::Tensor tensor;
      if (place >= tensors.size() || !describe(PyList_GET_ITEM(tensors.ptr(), Py_ssize_t(place)), &tensor)) {
        throw std::invalid_argument("there is no tensor with a place in memory at position " + std::to_string(place));
      }
      addresses.push_back(address_of(tensor));
    }
    const py::gil_scoped_release release;
    program_.run(device, stream, addresses);
  }

  size_t position() const { return program_.position(); }

 private:
  static std::vector<PatchedLaunch> launches(const std::vector<Step>& steps) {
    std::vector<PatchedLaunch> launches;
    for (const auto& [launched, grid, parameters, patches] : steps) {
      PatchedLaunch launch{launched.cast<Launchable*>(), grid, std::string(parameters), {}};
      for (const auto& [place, slot, offset, is_map] : patches) launch.patches.push_back({place, slot, offset, is_map});
      launches.push_back(std::move(launch));
    }
    return launches;
  }

  Program program_;
  std::vector<size_t> places_;
  std::vector<py::object> launched_;
};

bool is_one_of(const py::tuple& classes, py::handle value) {
  return std::any_of(classes.begin(), classes.end(), [&](py::handle known) { return known.is(py::type::handle_of(value)); });
}

bool is_constant(py::handle value) {
  PyObject* object = value.ptr();
  return value.is_none() || PyBool_Check(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
         PyUnicode_CheckExact(object);
}

bool take_apart(py::handle values, const py::tuple& classes, py::list* tensors, py::list* others) {
  for (const py::handle value : values) {
    if (is_one_of(classes, value)) {
      tensors->append(value);
      others->append(classes[0]);
    } else if (is_constant(value)) {
      others->append(value);
    } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
      py::list within;
      if (!take_apart(value, classes, tensors, &within)) return false;
      others->append(py::tuple(within));
    } else {
      return false;
    }
  }
  return true;
}

py::object apart(const py::tuple& values, const py::tuple& classes) {
  py::list tensors, others;
  if (!take_apart(values, classes, &tensors, &others)) return py::none();
  return py::make_tuple(py::tuple(tensors), py::tuple(others));
}

template <class Value>
void append(std::string* bytes, const Value* values, size_t count = 1) {
  bytes->append(reinterpret_cast<const char*>(values), count * sizeof(Value));
}

py::object signature(const py::tuple& tensors, const py::tuple& classes, uint64_t alignment) {
  std::string bytes;
  bytes.reserve(64 * tensors.size());
  for (const py::handle tensor : tensors) {
    dlpack::Tensor found;
    if (!is_one_of(classes, tensor) || !describe(tensor.ptr(), &found)) return py::none();
    const uint64_t remainder = address_of(found) % alignment;
    append(&bytes, &found.dtype);
    append(&bytes, &found.device);
    append(&bytes, &remainder);
    append(&bytes, &found.num_dims);
    append(&bytes, found.shape, size_t(found.num_dims));
    append(&bytes, found.strides, size_t(found.num_dims));
  }
  return py::bytes(bytes);
}

// 0 where elements do not lie one behind the other, in the order of their indices.
uint64_t packed_bytes(const dlpack::Tensor& tensor) {
  int64_t count = 1;
  for (int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != count) return 0;
    count *= tensor.shape[dim];
  }
  return uint64_t(count) * tensor.dtype.bits * tensor.dtype.lanes / 8;
}

bool is_row(const py::tuple& tensors, const py::tuple& classes) {
  dlpack::Tensor first;
  for (size_t number = 0; number < tensors.size(); ++number) {
    const py::handle tensor = tensors[number];
    dlpack::Tensor found;
    if (!is_one_of(classes, tensor) || !describe(tensor.ptr(), &found)) return false;
    if (number == 0) first = found;
    const bool is_alike = std::memcmp(&found.dtype, &first.dtype, sizeof(found.dtype)) == 0 &&
                          std::memcmp(&found.device, &first.device, sizeof(found.device)) == 0 &&
                          std::equal(found.shape, found.shape + found.num_dims, first.shape, first.shape + first.num_dims);
    const uint64_t size = packed_bytes(found);
    if (!is_alike || size == 0 || address_of(found) != address_of(first) + number * size) return false;
  }
  return true;
}

py::bytes matrix_map(int device, int dtype, uint64_t address, uint64_t rows, uint64_t cols, uint64_t pitch,
                     uint32_t box_rows, uint32_t box_cols, int swizzle) {
  return encode({device, dtype, address, rows, cols, pitch, box_rows, box_cols, swizzle});
}

}  // namespace

void define_host(py::module_& parent) {
  py::module_ module = parent.def_submodule("cuda", "CUDA kernels by the driver's interface.");
  py::class_<Launchable>(module, "Launchable", "What is launched with parameters that lie in memory.")
      .def("launch", &launch)
      .def_property_readonly("label", &Launchable::label);
  py::class_<LoadedKernel, Launchable>(module, "Kernel")
      .def(py::init(&load), py::arg("cubin"), py::arg("entry"), py::arg("label"), py::kw_only(), py::arg("cluster") = 1,
           py::arg("shared_bytes") = 0, py::arg("overlaps") = false)
      .def("load", &LoadedKernel::load, py::call_guard<py::gil_scoped_release>())
      .def("registers", [](const LoadedKernel& k, int device) { return k.attribute(driver::kRegisters, device); })
      .def("local_bytes", [](const LoadedKernel& k, int device) { return k.attribute(driver::kLocalBytes, device); });
  py::class_<Product, Launchable>(module, "Product", "A product of matrices by cuBLASLt.")
      .def(py::init(&product), py::arg("library"), py::arg("device"), py::arg("extents"), py::arg("pitches"),
           py::arg("types"), py::arg("alignments"), py::kw_only(), py::arg("fast"), py::arg("accumulate"),
           py::arg("workspace_bytes"), py::arg("turned") = std::array<bool, 2>{},
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly_static("PARAMETERS", [](py::handle) { return Product::kParameters; });
  module.def("compute_capability", &compute_capability, "(major, minor) of a device.");
  py::class_<KeptProgram>(module, "Program", "Launches that are repeated with other addresses.")
      .def(py::init<std::vector<Step>, std::vector<size_t>>(),
           "Of (kernel or product, grid, parameters, [(place, slot, offset, whether a tensor map lies there)]) for each launch; and "
           "by slot the position of its tensor among those of a run.")
      .def("run", &KeptProgram::run, "(device, stream, list of tensors)")
      .def_property_readonly("position", &KeptProgram::position, "Number of the launch that failed, after an exception.");
  module.def("apart", &apart,
             "The tensors of these classes among values and in tuples and lists of them; and the values, with a class in "
             "the place of every tensor. None where there is anything but such tensors and numbers, strings and None: "
             "(values, classes).");
  module.def("signature", &signature,
             "Types, devices, shapes, strides and addresses modulo `alignment` of a tuple of tensors, as bytes; None where "
             "one is of none of the `classes`, or has no place in memory: (tensors, classes, alignment).");
  module.def("is_row", &is_row,
             "Whether tensors of these classes are packed, alike in type, device and shape, and lie one behind the other in "
             "memory: (tensors, classes).");
  module.def("matrix_map", &matrix_map,
             "Tensor map of a matrix for the bulk copy engine, as bytes: (device, dtype, address, rows, cols, pitch in "
             "bytes, rows and columns of a box, swizzle).");
}

}  // namespace te_dist
