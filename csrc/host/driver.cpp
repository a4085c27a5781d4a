#include "driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <stdexcept>

namespace te_dist::driver {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kMaxDevices = 64;

template <class Function>
void find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function) return;
  throw std::runtime_error(std::string(kLibrary) + " has no " + name + "; te_dist needs a driver for CUDA 12.1 or later");
}

Functions find_functions() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(std::string("no CUDA driver: ") + dlerror() +
                             "; install NVIDIA's driver, or keep tensors on the CPU");
  }
  Functions f{};
  find(library, "cuInit", &f.init);
  find(library, "cuGetErrorName", &f.error_name);
  find(library, "cuGetErrorString", &f.error_text);
  find(library, "cuDeviceGetAttribute", &f.device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", &f.retain_primary_context);
  find(library, "cuCtxGetCurrent", &f.current_context);
  find(library, "cuThreadExchangeStreamCaptureMode", &f.exchange_capture_mode);
  find(library, "cuCtxPushCurrent_v2", &f.push_context);
  find(library, "cuCtxPopCurrent_v2", &f.pop_context);
  find(library, "cuLibraryLoadData", &f.load_library);
  find(library, "cuLibraryUnload", &f.unload_library);
  find(library, "cuLibraryGetKernel", &f.find_kernel);
  find(library, "cuKernelGetAttribute", &f.kernel_attribute);
  find(library, "cuKernelSetAttribute", &f.set_kernel_attribute);
  find(library, "cuKernelGetFunction", &f.load_into_context);
  find(library, "cuLaunchKernelEx", &f.launch);
  find(library, "cuTensorMapEncodeTiled", &f.encode_tiled);
  find(library, "cuTensorMapReplaceAddress", &f.replace_address);
  const Result result = f.init(0);
  if (result != kSuccess) throw std::runtime_error("cuInit failed: error " + std::to_string(result));
  return f;
}

// Never released: torch holds the same contexts to the end of the process.
Context primary_context(Device device) {
  static std::array<std::atomic<Context>, kMaxDevices> contexts{};
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("no CUDA device " + std::to_string(device));
  Context context = contexts[size_t(device)].load(std::memory_order_acquire);
  if (!context) {
    check(functions().retain_primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    contexts[size_t(device)].store(context, std::memory_order_release);
  }
  return context;
}

}  // namespace

const Functions& functions() {
  static const Functions found = find_functions();
  return found;
}

std::string describe(Result result) {
  const char *name = nullptr, *text = nullptr;
  functions().error_name(result, &name);
  functions().error_text(result, &text);
  if (!name) return "error " + std::to_string(result);
  return std::string(name) + (text ? std::string(" (") + text + ")" : "");
}

void check(Result result, const std::string& what) {
  if (result != kSuccess) throw std::runtime_error(what + " failed: " + describe(result));
}

ContextGuard::ContextGuard(Device device) : pushed_(false) {
  const Context wanted = primary_context(device);
  Context current = nullptr;
  check(functions().current_context(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  check(functions().push_context(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  Context popped;
  if (pushed_) functions().pop_context(&popped);
}

RelaxedCapture::RelaxedCapture() {
  check(functions().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { functions().exchange_capture_mode(&mode_); }

}  // namespace te_dist::driver
