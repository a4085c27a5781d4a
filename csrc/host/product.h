// Products of matrices by cuBLASLt: its algorithm is found once, and launched with any addresses.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>

#include "cublaslt.h"
#include "launchable.h"

namespace te_dist {

// D (M, N) = A (M, K) B (N, K)^T; of FP8 matrices, times a scale of A and one of B. Rows are contiguous. What is turned
// lies in memory as (K, M), (K, N); those of FP8 never are.
struct ProductSpec {
  std::array<int64_t, 3> extents;      // M, N, K
  std::array<int64_t, 3> pitches;      // elements from row to row of A, B and D
  std::array<std::string, 4> types;    // of A, B, D and the bias; "": no bias
  std::array<uint32_t, 4> alignments;  // bytes of which the addresses of A, B, D and the bias are multiples
  bool fast;                           // whether sums stay in the tensor cores' precision, below that of fp32
  bool accumulate;                     // whether the product is added to D
  uint64_t workspace_bytes;
  std::array<bool, 2> turned;  // A and B
};

// The only argument of a launch; addresses in device memory.
struct ProductAddresses {
  uint64_t a, a_scale, b, b_scale;  // scales of FP8 matrices
  uint64_t bias;  // (N,), 0 for none
  uint64_t workspace;
  uint64_t out;
};

class Product : public Launchable {
 public:
  // `ProductAddresses` by name and by the character of its type, as te_dist/kernels/spec.py reads it.
  static constexpr char kParameters[] = "a:P a_scale:P b:P b_scale:P bias:P workspace:P out:P";

  // Allocates nothing on the device but, for the first one there, what cuBLASLt itself needs.
  Product(const std::string& library, int device, const ProductSpec& spec);

  // `grid` means nothing here.
  void launch(int device, uint64_t stream, std::array<unsigned, 3> grid, std::vector<void*>& arguments) override;

  const std::string& label() const override { return label_; }

 private:
  // A descriptor, destroyed with its owner.
  template <class Descriptor>
  using Owned = std::unique_ptr<std::remove_pointer_t<Descriptor>, cublaslt::Status (*)(Descriptor)>;

  Owned<cublaslt::Operation> operation(const ProductSpec& spec) const;
  // Of one that the product reads (extents of what is kept and of what is summed), and of the one that it writes.
  Owned<cublaslt::Layout> operand(const ProductSpec& spec, size_t which) const;
  Owned<cublaslt::Layout> layout(const std::string& type, int64_t rows, int64_t cols, int64_t pitch) const;
  Owned<cublaslt::Preference> preference(const ProductSpec& spec) const;

  template <class Value>
  void set(cublaslt::Operation operation, int attribute, Value value) const {
    const cublaslt::Status status = library_.functions().set_operation(operation, attribute, &value, sizeof value);
    if (status == cublaslt::kSuccess) return;
    library_.fail(status, "setting attribute " + std::to_string(attribute) + " of " + label_);
  }

  template <class Value>
  void set(cublaslt::Preference preference, int attribute, Value value) const {
    const cublaslt::Status status = library_.functions().set_preference(preference, attribute, &value, sizeof value);
    if (status == cublaslt::kSuccess) return;
    library_.fail(status, "setting preference " + std::to_string(attribute) + " for " + label_);
  }

  cublaslt::Library& library_;
  std::string label_;
  int device_;
  uint64_t workspace_bytes_;
  float beta_;
  bool has_bias_, has_scales_;
  std::mutex mutex_;  // of the operation, which holds addresses of the launch under way
  Owned<cublaslt::Operation> operation_;
  Owned<cublaslt::Layout> a_, b_, out_;
  cublaslt::Handle handle_ = nullptr;
  cublaslt::Algorithm algorithm_{};
};

}  // namespace te_dist
