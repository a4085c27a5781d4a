// Holds csrc/host against the declarations of CUDA's own cuda.h. Compiled by test_driver_abi.py, never run.
#include <cuda.h>

#include "driver.h"
#include "same.h"

namespace ours = te_dist::driver;

// Values.
static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kMaxThreadsPerBlock == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
static_assert(ours::kSharedBytes == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
static_assert(ours::kLocalBytes == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
static_assert(ours::kRegisters == CU_FUNC_ATTRIBUTE_NUM_REGS);
static_assert(ours::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(ours::kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kRelaxedCapture == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(ours::kClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(ours::kProgrammaticStreamSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

// Layouts.
SAME_SIZE(ours::LaunchAttributeValue, CUlaunchAttributeValue);
SAME_PLACE(ours::LaunchAttributeValue, cluster, CUlaunchAttributeValue, clusterDim);
SAME_PLACE(ours::LaunchAttributeValue, programmatic_stream_serialization, CUlaunchAttributeValue,
           programmaticStreamSerializationAllowed);
SAME_SIZE(ours::LaunchAttribute, CUlaunchAttribute);
SAME_PLACE(ours::LaunchAttribute, id, CUlaunchAttribute, id);
SAME_PLACE(ours::LaunchAttribute, value, CUlaunchAttribute, value);
SAME_SIZE(ours::LaunchConfig, CUlaunchConfig);
SAME_PLACE(ours::LaunchConfig, grid_x, CUlaunchConfig, gridDimX);
SAME_PLACE(ours::LaunchConfig, grid_y, CUlaunchConfig, gridDimY);
SAME_PLACE(ours::LaunchConfig, grid_z, CUlaunchConfig, gridDimZ);
SAME_PLACE(ours::LaunchConfig, block_x, CUlaunchConfig, blockDimX);
SAME_PLACE(ours::LaunchConfig, block_y, CUlaunchConfig, blockDimY);
SAME_PLACE(ours::LaunchConfig, block_z, CUlaunchConfig, blockDimZ);
SAME_PLACE(ours::LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(ours::LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_PLACE(ours::LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_PLACE(ours::LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
SAME_PLACE(ours::TensorMap, opaque, CUtensorMap, opaque);
// cuda.h aligns a map to 64 bytes or more, by version; a kernel's parameter wants 64.
static_assert(sizeof(ours::TensorMap) == sizeof(CUtensorMap) && alignof(ours::TensorMap) >= 64);

// Functions.
SAME_FUNCTION(init, cuInit);
SAME_FUNCTION(error_name, cuGetErrorName);
SAME_FUNCTION(error_text, cuGetErrorString);
SAME_FUNCTION(device_attribute, cuDeviceGetAttribute);
SAME_FUNCTION(retain_primary_context, cuDevicePrimaryCtxRetain);
SAME_FUNCTION(current_context, cuCtxGetCurrent);
SAME_FUNCTION(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
SAME_FUNCTION(push_context, cuCtxPushCurrent);
SAME_FUNCTION(pop_context, cuCtxPopCurrent);
SAME_FUNCTION(load_library, cuLibraryLoadData);
SAME_FUNCTION(unload_library, cuLibraryUnload);
SAME_FUNCTION(find_kernel, cuLibraryGetKernel);
SAME_FUNCTION(kernel_attribute, cuKernelGetAttribute);
SAME_FUNCTION(set_kernel_attribute, cuKernelSetAttribute);
SAME_FUNCTION(load_into_context, cuKernelGetFunction);
SAME_FUNCTION(encode_tiled, cuTensorMapEncodeTiled);
SAME_FUNCTION(replace_address, cuTensorMapReplaceAddress);
// A kernel is passed where the header says function: the driver takes both, cast as CUDA's own samples cast it.
SAME_FUNCTION(launch, cuLaunchKernelEx);
