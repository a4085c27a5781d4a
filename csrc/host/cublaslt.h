// cuBLASLt, found when it is first needed. Every failure becomes a std::runtime_error that names the call.
#pragma once

#include <array>
#include <mutex>
#include <string>

#include "cublaslt_abi.h"

namespace te_dist::cublaslt {

struct Functions {
  const char* (*status_name)(Status);
  const char* (*status_text)(Status);
  Status (*create_handle)(Handle*);
  Status (*create_operation)(Operation*, int compute_type, int scale_type);
  Status (*destroy_operation)(Operation);
  Status (*set_operation)(Operation, int attribute, const void* value, size_t bytes);
  Status (*create_layout)(Layout*, int type, uint64_t rows, uint64_t cols, int64_t pitch);
  Status (*destroy_layout)(Layout);
  Status (*create_preference)(Preference*);
  Status (*destroy_preference)(Preference);
  Status (*set_preference)(Preference, int attribute, const void* value, size_t bytes);
  Status (*choose)(Handle, Operation, Layout a, Layout b, Layout c, Layout d, Preference, int count, Choice*, int* found);
  Status (*multiply)(Handle, Operation, const void* alpha, const void* a, Layout, const void* b, Layout,
                     const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace,
                     size_t workspace_bytes, Stream);
};

class Library {
 public:
  // `name`: as the dynamic linker takes it. One that is loaded already, by torch, is not loaded again.
  explicit Library(const std::string& name);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions& functions() const { return functions_; }

  // That of a device, whose context is current. Serves all threads and streams; never released.
  Handle handle(int device);

  // Name and text of a status: "CUBLAS_STATUS_INVALID_VALUE (an unsupported value or parameter was passed)".
  std::string describe(Status status) const;

  // Throws for a status that is an error; `what` says what was tried.
  [[noreturn]] void fail(Status status, const std::string& what) const;

 private:
  Functions functions_{};
  std::mutex mutex_;
  std::array<Handle, 64> handles_{};  // by device
};

// The same one for equal names; never unloaded.
Library& library(const std::string& name);

}  // namespace te_dist::cublaslt
