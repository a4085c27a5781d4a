// The part of cuBLASLt's interface that is used. Declared here so that nothing of CUDA is needed to build;
// tests/csrc/cublaslt_abi.cpp holds it against cublasLt.h where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_dist::cublaslt {

using Status = int;
using Handle = struct HandleTag*;
using Operation = struct OperationTag*;
using Layout = struct LayoutTag*;
using Preference = struct PreferenceTag*;
using Stream = struct StreamTag*;

constexpr Status kSuccess = 0, kNotSupported = 15;

// Types of values, and what products are summed in.
constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14, kE4M3 = 28, kE5M2 = 29;
constexpr int kComputeFloat32 = 68;

// Attributes of an operation.
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8, kScaleOfA = 17, kScaleOfB = 18;
constexpr int kFastAccumulation = 25, kBiasType = 26;

constexpr int32_t kAsItIs = 0, kTransposed = 1;
constexpr uint32_t kAddBias = 4;

// Attributes of a preference.
constexpr int kMaxWorkspaceBytes = 1, kReductionSchemes = 3, kAlignmentOfA = 5, kAlignmentOfB = 6, kAlignmentOfC = 7;
constexpr int kAlignmentOfD = 8;

constexpr uint32_t kReducesInFloat32 = 2, kReducesAnyhow = 7;  // parts of sums, in a mask

struct Algorithm {
  uint64_t data[8];
};

struct Choice {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

}  // namespace te_dist::cublaslt
