#include "product.h"

#include <cstring>
#include <stdexcept>

#include "driver.h"

namespace te_dist {
namespace {

using namespace cublaslt;

constexpr uint64_t kScaleAlignment = 16;  // bytes

int type_of(const std::string& name) {
  if (name == "e4m3") return kE4M3;
  if (name == "e5m2") return kE5M2;
  if (name == "bfloat16") return kBFloat16;
  if (name == "float16") return kFloat16;
  if (name == "float32") return kFloat32;
  throw std::invalid_argument("cuBLASLt is asked for no type '" + name + "'");
}

bool is_fp8(const std::string& type) { return type == "e4m3" || type == "e5m2"; }

std::string describe(const ProductSpec& spec) {
  const auto [rows, cols, _] = spec.extents;
  const auto& [a, b, out, bias] = spec.types;
  const auto matrix = [&](const std::string& type, int64_t kept, bool turned) {
    const std::string k = std::to_string(spec.extents[2]), other = std::to_string(kept);
    return type + " (" + (turned ? k + " x " + other : other + " x " + k) + ")";
  };
  const std::string turns = spec.turned[0] ? spec.turned[1] ? ", the first transposed, " : ", both transposed, "
                            : spec.turned[1] ? ", " : ", transposed, ";
  return "the product of " + matrix(a, rows, spec.turned[0]) + " by " + matrix(b, cols, spec.turned[1]) + turns +
         (spec.accumulate ? "added to " : "as ") + out + (bias.empty() ? "" : ", with bias " + bias) + ", summed in " +
         (spec.fast ? "the tensor cores' precision" : "fp32") + ", with a workspace of " +
         std::to_string(spec.workspace_bytes) + " bytes";
}

}  // namespace

// cuBLASLt's matrices have contiguous columns: what lies in memory as D, A and B is to it D^T (N, M), A^T (K, M) and
// B^T (K, N), and D^T = (B^T)^T A^T. So what it calls A is B here, and the other way round. What is turned is A, or B,
// to it as well.
Product::Product(const std::string& library, int device, const ProductSpec& spec)
    : library_(cublaslt::library(library)),
      label_(describe(spec)),
      device_(device),
      workspace_bytes_(spec.workspace_bytes),
      beta_(spec.accumulate ? 1.0f : 0.0f),
      has_bias_(!spec.types[3].empty()),
      has_scales_(is_fp8(spec.types[0])),
      operation_(operation(spec)),
      a_(operand(spec, 0)),
      b_(operand(spec, 1)),
      out_(layout(spec.types[2], spec.extents[1], spec.extents[0], spec.pitches[2])) {
  const Owned<Preference> preferred = preference(spec);
  const driver::ContextGuard guard(device);
  const driver::RelaxedCapture relaxed;
  handle_ = library_.handle(device);
  Choice choice{};
  int found = 0;
  Status status = library_.functions().choose(handle_, operation_.get(), b_.get(), a_.get(), out_.get(), out_.get(),
                                              preferred.get(), 1, &choice, &found);
  if (status == kSuccess) status = found ? choice.status : kNotSupported;
  if (status != kSuccess) {
    throw std::runtime_error("cuBLASLt has no algorithm for " + label_ + ": " + library_.describe(status) +
                             (has_scales_ ? "; it wants N and K that are multiples of 16, and e4m3 on one side: pad "
                                            "with zeros, or choose a recipe with blocks"
                                          : ""));
  }
  algorithm_ = choice.algorithm;
}

Product::Owned<Operation> Product::operation(const ProductSpec& spec) const {
  Operation made = nullptr;
  const Status status = library_.functions().create_operation(&made, kComputeFloat32, kFloat32);
  if (status != kSuccess) library_.fail(status, "describing " + label_);
  Owned<Operation> owned(made, library_.functions().destroy_operation);
  set(made, kTransposeA, spec.turned[1] ? kAsItIs : kTransposed);
  set(made, kTransposeB, spec.turned[0] ? kTransposed : kAsItIs);
  if (has_scales_) {
    set(made, kFastAccumulation, int8_t(spec.fast));
    // Which algorithms fit depends on what these addresses are multiples of; nothing is read there.
    set(made, kScaleOfA, kScaleAlignment);
    set(made, kScaleOfB, kScaleAlignment);
  }
  if (!has_bias_) return owned;
  set(made, kEpilogue, kAddBias);
  set(made, kBiasType, int32_t(type_of(spec.types[3])));
  set(made, kBiasPointer, uint64_t(spec.alignments[3]));
  return owned;
}

Product::Owned<Layout> Product::operand(const ProductSpec& spec, size_t which) const {
  const int64_t kept = spec.extents[which], depth = spec.extents[2];
  const bool turned = spec.turned[which];
  return layout(spec.types[which], turned ? kept : depth, turned ? depth : kept, spec.pitches[which]);
}

Product::Owned<Layout> Product::layout(const std::string& type, int64_t rows, int64_t cols, int64_t pitch) const {
  Layout made = nullptr;
  const Status status = library_.functions().create_layout(&made, type_of(type), uint64_t(rows), uint64_t(cols), pitch);
  if (status != kSuccess) library_.fail(status, "describing a matrix of " + label_);
  return {made, library_.functions().destroy_layout};
}

Product::Owned<Preference> Product::preference(const ProductSpec& spec) const {
  Preference made = nullptr;
  const Status status = library_.functions().create_preference(&made);
  if (status != kSuccess) library_.fail(status, "describing what is preferred for " + label_);
  Owned<Preference> owned(made, library_.functions().destroy_preference);
  set(made, kMaxWorkspaceBytes, spec.workspace_bytes);
  set(made, kReductionSchemes, spec.types[2] == "float32" ? kReducesAnyhow : kReducesInFloat32);
  set(made, kAlignmentOfA, spec.alignments[1]);
  set(made, kAlignmentOfB, spec.alignments[0]);
  set(made, kAlignmentOfC, spec.alignments[2]);
  set(made, kAlignmentOfD, spec.alignments[2]);
  return owned;
}

void Product::launch(int device, uint64_t stream, std::array<unsigned, 3>, std::vector<void*>& arguments) {
  if (device != device_ || arguments.size() != 1) {
    throw std::invalid_argument(label_ + " takes one argument on device " + std::to_string(device_) + ", got " +
                                std::to_string(arguments.size()) + " on device " + std::to_string(device));
  }
  ProductAddresses at;
  std::memcpy(&at, arguments[0], sizeof at);
  const auto pointer = [](uint64_t address) { return reinterpret_cast<void*>(address); };
  const float alpha = 1.0f;
  const driver::ContextGuard guard(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_scales_) {
    set(operation_.get(), kScaleOfA, at.b_scale);
    set(operation_.get(), kScaleOfB, at.a_scale);
  }
  if (has_bias_) set(operation_.get(), kBiasPointer, at.bias);
  const Status status = library_.functions().multiply(
      handle_, operation_.get(), &alpha, pointer(at.b), b_.get(), pointer(at.a), a_.get(), &beta_, pointer(at.out),
      out_.get(), pointer(at.out), out_.get(), &algorithm_, pointer(at.workspace), workspace_bytes_,
      reinterpret_cast<cublaslt::Stream>(stream));
  if (status != kSuccess) library_.fail(status, label_);
}

}  // namespace te_dist
