#include "kernel.h"

#include <stdexcept>

namespace te_dist {
namespace {

template <class Numbers>
std::string joined(const Numbers& numbers) {
  std::string text;
  for (const auto number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "(" + text + ")";
}

std::string describe_launch(const driver::LaunchConfig& c, const LaunchShape& shape) {
  return "grid " + joined(std::array<unsigned, 3>{c.grid_x, c.grid_y, c.grid_z}) + ", " + std::to_string(c.block_x) +
         " threads, cluster " + std::to_string(shape.cluster) + ", " + std::to_string(shape.shared_bytes) +
         " bytes of dynamic shared memory";
}

}  // namespace

LoadedKernel::LoadedKernel(const std::string& cubin, const std::string& entry, std::string label, LaunchShape shape)
    : label_(std::move(label)), shape_(shape) {
  const auto& f = driver::functions();
  driver::check(f.load_library(&library_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                "loading the cubin of " + label_);
  const driver::Result result = f.find_kernel(&kernel_, library_, entry.c_str());
  if (result == driver::kSuccess) return;
  f.unload_library(library_);
  driver::check(result, "finding " + entry + " in the cubin of " + label_);
}

LoadedKernel::~LoadedKernel() { driver::functions().unload_library(library_); }

int LoadedKernel::attribute(int attribute, int device) const {
  int value = 0;
  driver::check(driver::functions().kernel_attribute(&value, attribute, kernel_, device),
                "reading an attribute of " + label_);
  return value;
}

void LoadedKernel::load(int device) {
  const driver::ContextGuard guard(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (threads_[size_t(device)]) return;
  void* function = nullptr;
  driver::check(driver::functions().load_into_context(&function, kernel_), "loading " + label_);
  if (shape_.shared_bytes) {
    driver::check(driver::functions().set_kernel_attribute(driver::kMaxDynamicSharedBytes, int(shape_.shared_bytes),
                                                           kernel_, device),
                  "asking for " + std::to_string(shape_.shared_bytes) + " bytes of shared memory for " + label_);
  }
  threads_[size_t(device)] = unsigned(attribute(driver::kMaxThreadsPerBlock, device));
}

void LoadedKernel::launch(int device, uint64_t stream, std::array<unsigned, 3> grid, std::vector<void*>& arguments) {
  const driver::ContextGuard guard(device);
  if (!threads_[size_t(device)].load(std::memory_order_acquire)) load(device);
  driver::LaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape_.cluster > 1) {
    attributes[count].id = driver::kClusterDimension;
    attributes[count++].value.cluster = {shape_.cluster, 1, 1};
  }
  if (shape_.overlaps) {
    attributes[count].id = driver::kProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  const driver::LaunchConfig config{grid[0], grid[1], grid[2], threads_[size_t(device)], 1, 1, shape_.shared_bytes,
                                    reinterpret_cast<driver::Stream>(stream), attributes, count};
  const driver::Result result = driver::functions().launch(&config, kernel_, arguments.data(), nullptr);
  if (result == driver::kSuccess) return;
  throw std::runtime_error("launching " + label_ + " failed: " + driver::describe(result) + "; " +
                           describe_launch(config, shape_));
}

std::array<int, 2> compute_capability(int device) {
  std::array<int, 2> capability{};
  const auto& f = driver::functions();
  driver::check(f.device_attribute(&capability[0], driver::kComputeCapabilityMajor, device), "cuDeviceGetAttribute");
  driver::check(f.device_attribute(&capability[1], driver::kComputeCapabilityMinor, device), "cuDeviceGetAttribute");
  return capability;
}

std::string encode(const MatrixMap& map) {
  const driver::ContextGuard guard(map.device);  // threads of autograd begin without one
  constexpr int kPromoteTo256Bytes = 3;
  driver::TensorMap descriptor{};
  const uint64_t extents[2] = {map.cols, map.rows};
  const uint32_t box[2] = {map.box_cols, map.box_rows}, element_strides[2] = {1, 1};
  const driver::Result result = driver::functions().encode_tiled(
      &descriptor, map.dtype, 2, reinterpret_cast<void*>(map.address), extents, &map.pitch, box, element_strides, 0,
      map.swizzle, kPromoteTo256Bytes, 0);
  if (result == driver::kSuccess) return {reinterpret_cast<const char*>(&descriptor), sizeof descriptor};
  throw std::runtime_error("cuTensorMapEncodeTiled failed: " + driver::describe(result) + "; type " +
                           std::to_string(map.dtype) + ", address " + std::to_string(map.address) + ", " +
                           std::to_string(map.rows) + " x " + std::to_string(map.cols) + ", pitch " +
                           std::to_string(map.pitch) + ", box " + joined(std::array<uint32_t, 2>{box[1], box[0]}));
}

}  // namespace te_dist
