// CUDA's driver, found when it is first needed. Every failure becomes a std::runtime_error that names the call.
#pragma once

#include <string>

#include "driver_abi.h"

namespace te_dist::driver {

struct Functions {
  Result (*init)(unsigned flags);
  Result (*error_name)(Result, const char**);
  Result (*error_text)(Result, const char**);
  Result (*device_attribute)(int*, int attribute, Device);
  Result (*retain_primary_context)(Context*, Device);
  Result (*current_context)(Context*);
  Result (*exchange_capture_mode)(int* mode);
  Result (*push_context)(Context);
  Result (*pop_context)(Context*);
  Result (*load_library)(Library*, const void* image, int*, void**, unsigned, int*, void**, unsigned);
  Result (*unload_library)(Library);
  Result (*find_kernel)(Kernel*, Library, const char* name);
  Result (*kernel_attribute)(int*, int attribute, Kernel, Device);
  Result (*set_kernel_attribute)(int attribute, int value, Kernel, Device);
  Result (*load_into_context)(void** function, Kernel);
  Result (*launch)(const LaunchConfig*, Kernel, void** arguments, void** extra);
  Result (*encode_tiled)(TensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* extents,
                         const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                         int swizzle, int l2_promotion, int out_of_bounds_fill);
  Result (*replace_address)(TensorMap*, void* address);
};

const Functions& functions();

// Name and text of an error: "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string describe(Result result);

// Throws where `result` is an error; `what` says what was tried.
void check(Result result, const std::string& what);

// Makes the primary context of a device current, the one torch uses, and the former one again at its end.
class ContextGuard {
 public:
  explicit ContextGuard(Device device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// Lets this thread allocate while a stream is captured: what it does inside is not for the graph.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kRelaxedCapture;  // that of the thread outside
};

}  // namespace te_dist::driver
