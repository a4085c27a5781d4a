// The part of DLPack's interface in C by which torch tells what a tensor is. Declared here so that nothing of torch is
// needed to build; tests/csrc/dlpack_abi.cpp holds it against the dlpack.h that torch is built with.
#pragma once

#include <cstdint>

namespace te_dist::dlpack {

constexpr uint32_t kMajorVersion = 1;  // of what is declared here

struct Version {
  uint32_t major, minor;
};

struct Device {
  int type;
  int32_t index;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

// What the interfaces of all versions begin with.
struct Header {
  Version version;
  Header* previous;
};

struct Exchange {
  Header header;
  void (*unused[3])();
  int (*describe)(void* object, Tensor*);  // not 0: failed, with Python's exception set. The object owns what is found
};

}  // namespace te_dist::dlpack
