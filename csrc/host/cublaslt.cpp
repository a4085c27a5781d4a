#include "cublaslt.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>
#include <type_traits>

namespace te_dist::cublaslt {

Library::Library(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(std::string("no cuBLASLt, which multiplies FP8 with one scale: ") + dlerror() +
                             "; install the one of torch's version of CUDA (pip install nvidia-cublas), or choose a "
                             "recipe with blocks");
  }
  const auto find = [&](const char* symbol, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
    if (*function) return;
    throw std::runtime_error(name + " has no " + symbol + "; te_dist needs cuBLASLt of CUDA 12.1 or later");
  };
  Functions& f = functions_;
  find("cublasLtGetStatusName", &f.status_name);
  find("cublasLtGetStatusString", &f.status_text);
  find("cublasLtCreate", &f.create_handle);
  find("cublasLtMatmulDescCreate", &f.create_operation);
  find("cublasLtMatmulDescDestroy", &f.destroy_operation);
  find("cublasLtMatmulDescSetAttribute", &f.set_operation);
  find("cublasLtMatrixLayoutCreate", &f.create_layout);
  find("cublasLtMatrixLayoutDestroy", &f.destroy_layout);
  find("cublasLtMatmulPreferenceCreate", &f.create_preference);
  find("cublasLtMatmulPreferenceDestroy", &f.destroy_preference);
  find("cublasLtMatmulPreferenceSetAttribute", &f.set_preference);
  find("cublasLtMatmulAlgoGetHeuristic", &f.choose);
  find("cublasLtMatmul", &f.multiply);
}

Handle Library::handle(int device) {
  if (device < 0 || size_t(device) >= handles_.size()) {
    throw std::runtime_error("no CUDA device " + std::to_string(device));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Handle& handle = handles_[size_t(device)];
  if (handle) return handle;
  const Status status = functions_.create_handle(&handle);
  if (status == kSuccess) return handle;
  handle = nullptr;
  fail(status, "preparing cuBLASLt for device " + std::to_string(device));
}

std::string Library::describe(Status status) const {
  const char *name = functions_.status_name(status), *text = functions_.status_text(status);
  return (name ? name : "error " + std::to_string(status)) + (text ? std::string(" (") + text + ")" : "");
}

void Library::fail(Status status, const std::string& what) const {
  throw std::runtime_error(what + " failed: " + describe(status));
}

Library& library(const std::string& name) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, Library>;
  const std::lock_guard<std::mutex> lock(mutex);
  return known.try_emplace(name, name).first->second;
}

}  // namespace te_dist::cublaslt
