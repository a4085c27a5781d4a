// Compiled kernels: loaded from a cubin once, launched on any device of its architecture.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "launchable.h"

namespace te_dist {

// What does not change from launch to launch. Threads of a block are those that the kernel was compiled for.
struct LaunchShape {
  unsigned cluster = 1;       // blocks of a cluster
  unsigned shared_bytes = 0;  // dynamic shared memory
  bool overlaps = false;      // may begin before the kernel in front of it in the stream has ended
};

class LoadedKernel : public Launchable {
 public:
  // `entry`: name of the kernel in the cubin. `label`: how messages call it.
  LoadedKernel(const std::string& cubin, const std::string& entry, std::string label, LaunchShape shape);
  ~LoadedKernel() override;
  LoadedKernel(const LoadedKernel&) = delete;
  LoadedKernel& operator=(const LoadedKernel&) = delete;

  // Brings the kernel to a device, so that a first launch there, under graph capture perhaps, has nothing left to load.
  void load(int device);

  void launch(int device, uint64_t stream, std::array<unsigned, 3> grid, std::vector<void*>& arguments) override;

  // Value of a kernel attribute (see driver_abi.h) on a device.
  int attribute(int attribute, int device) const;

  const std::string& label() const override { return label_; }

 private:
  std::string label_;
  LaunchShape shape_;
  driver::Library library_ = nullptr;
  driver::Kernel kernel_ = nullptr;
  std::mutex mutex_;
  std::array<std::atomic<unsigned>, 64> threads_{};  // of a block, by device; 0: not yet loaded there
};

// (major, minor) compute capability.
std::array<int, 2> compute_capability(int device);

// A matrix as the bulk copy engine sees it, and the box of it that is copied at a time. Outside of it are zeros.
struct MatrixMap {
  int device;
  int dtype;  // of cuTensorMapEncodeTiled
  uint64_t address;
  uint64_t rows, cols;
  uint64_t pitch;  // bytes from row to row
  uint32_t box_rows, box_cols;
  int swizzle;  // 0 none, 1 to 3: 32, 64, 128 bytes
};

// The descriptor, to be passed to a kernel by value.
std::string encode(const MatrixMap& map);

}  // namespace te_dist
