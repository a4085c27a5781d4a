// Holds csrc/host/dlpack_abi.h against the dlpack.h that torch is built with. Compiled by test_dlpack_abi.py, never run.
#include <ATen/dlpack.h>

#include <cstddef>
#include <type_traits>

#include "dlpack_abi.h"

namespace ours = te_dist::dlpack;

static_assert(ours::kMajorVersion == DLPACK_MAJOR_VERSION);

// Every member in order, so that none is left out between two that agree.
#define SAME_SIZE(a, b) static_assert(sizeof(a) == sizeof(b) && alignof(a) == alignof(b), "size or alignment of " #b)
#define SAME_PLACE(a, member, b, theirs)                                                              \
  static_assert(offsetof(a, member) == offsetof(b, theirs) && sizeof(a::member) == sizeof(b::theirs), \
                "place or size of " #theirs)

SAME_SIZE(ours::Version, DLPackVersion);
SAME_PLACE(ours::Version, major, DLPackVersion, major);
SAME_PLACE(ours::Version, minor, DLPackVersion, minor);
SAME_SIZE(ours::Device, DLDevice);
SAME_PLACE(ours::Device, type, DLDevice, device_type);
SAME_PLACE(ours::Device, index, DLDevice, device_id);
SAME_SIZE(ours::DataType, DLDataType);
SAME_PLACE(ours::DataType, code, DLDataType, code);
SAME_PLACE(ours::DataType, bits, DLDataType, bits);
SAME_PLACE(ours::DataType, lanes, DLDataType, lanes);
SAME_SIZE(ours::Tensor, DLTensor);
SAME_PLACE(ours::Tensor, data, DLTensor, data);
SAME_PLACE(ours::Tensor, device, DLTensor, device);
SAME_PLACE(ours::Tensor, num_dims, DLTensor, ndim);
SAME_PLACE(ours::Tensor, dtype, DLTensor, dtype);
SAME_PLACE(ours::Tensor, shape, DLTensor, shape);
SAME_PLACE(ours::Tensor, strides, DLTensor, strides);
SAME_PLACE(ours::Tensor, byte_offset, DLTensor, byte_offset);
SAME_SIZE(ours::Header, DLPackExchangeAPIHeader);
SAME_PLACE(ours::Header, version, DLPackExchangeAPIHeader, version);
SAME_PLACE(ours::Header, previous, DLPackExchangeAPIHeader, prev_api);
SAME_PLACE(ours::Exchange, header, DLPackExchangeAPI, header);
SAME_PLACE(ours::Exchange, describe, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
static_assert(std::is_same_v<decltype(DLPackExchangeAPI::dltensor_from_py_object_no_sync), int (*)(void*, DLTensor*)>);
