// The part of CUDA's driver interface that is used. Declared here so that nothing of CUDA is needed to build;
// tests/csrc/driver_abi.cpp holds it against cuda.h where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_dist::driver {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;
using Stream = struct StreamTag*;

constexpr Result kSuccess = 0;

// Attributes of a kernel.
constexpr int kMaxThreadsPerBlock = 0, kSharedBytes = 1, kLocalBytes = 3, kRegisters = 4, kMaxDynamicSharedBytes = 8;

// Attributes of a device.
constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;

// How much of the interface a thread may use while streams are captured.
constexpr int kRelaxedCapture = 2;

// Attributes of a launch.
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;

union LaunchAttributeValue {
  alignas(8) char pad[64];
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic_stream_serialization;
};

struct LaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

}  // namespace te_dist::driver
