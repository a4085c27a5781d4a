// A CUDA driver without a device, and a cuBLASLt that multiplies in host memory, as strict as NVIDIA's is documented to
// be. Compiled by test_product.py under the name of the driver's library.
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "cublaslt_abi.h"
#include "driver_abi.h"

using namespace te_dist::cublaslt;
namespace driver = te_dist::driver;

namespace {

constexpr Status kInvalid = 7;
int capture_mode = 0;  // global

using Attributes = std::map<int, std::string>;
const std::map<int, size_t> kOperationBytes{{kTransposeA, 4}, {kTransposeB, 4}, {kEpilogue, 4}, {kBiasPointer, 8},
                                            {kScaleOfA, 8},   {kScaleOfB, 8},   {kBiasType, 4}, {kFastAccumulation, 1}};
const std::map<int, size_t> kPreferenceBytes{
    {kMaxWorkspaceBytes, 8}, {kReductionSchemes, 4}, {kAlignmentOfA, 4}, {kAlignmentOfB, 4}, {kAlignmentOfC, 4}, {kAlignmentOfD, 4}};

struct Matrix {
  int type;
  uint64_t rows, cols;
  int64_t pitch;
};

Status set(Attributes* attributes, const std::map<int, size_t>& known, int attribute, const void* value, size_t bytes) {
  const auto size = known.find(attribute);
  if (size == known.end() || size->second != bytes) return kInvalid;
  (*attributes)[attribute].assign(static_cast<const char*>(value), bytes);
  return kSuccess;
}

template <class Value>
Value get(const Attributes& attributes, int attribute) {
  Value value{};
  const auto found = attributes.find(attribute);
  if (found != attributes.end()) std::memcpy(&value, found->second.data(), sizeof value);
  return value;
}

const Attributes& of(Operation operation) { return *reinterpret_cast<Attributes*>(operation); }
const Matrix& of(Layout layout) { return *reinterpret_cast<Matrix*>(layout); }

float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return code & 128 ? -size : size;
}

float e5m2(uint8_t code) {
  const int exponent = code >> 2 & 31, mantissa = code & 3;
  const float size = exponent ? std::ldexp(4.0f + mantissa, exponent - 17) : std::ldexp(float(mantissa), -16);
  return code & 128 ? -size : size;
}

float read(const void* data, int type, uint64_t at) {
  if (type == kE4M3) return e4m3(static_cast<const uint8_t*>(data)[at]);
  if (type == kE5M2) return e5m2(static_cast<const uint8_t*>(data)[at]);
  if (type == kFloat32) return static_cast<const float*>(data)[at];
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[at]) << 16;  // bfloat16
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void write(void* data, int type, uint64_t at, float value) {
  if (type == kFloat32) {
    static_cast<float*>(data)[at] = value;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  static_cast<uint16_t*>(data)[at] = uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

bool is_fp8(int type) { return type == kE4M3 || type == kE5M2; }

bool is_aligned(const void* address, uint32_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

}  // namespace

extern "C" {

driver::Result cuInit(unsigned) { return 0; }
driver::Result cuGetErrorName(driver::Result, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
driver::Result cuGetErrorString(driver::Result, const char** text) { return *text = "fake", 0; }
driver::Result cuDevicePrimaryCtxRetain(driver::Context* context, driver::Device) {
  return *context = reinterpret_cast<driver::Context>(8), 0;
}
driver::Result cuCtxGetCurrent(driver::Context* context) { return *context = nullptr, 0; }
driver::Result cuCtxPushCurrent_v2(driver::Context) { return 0; }
driver::Result cuCtxPopCurrent_v2(driver::Context*) { return 0; }
driver::Result cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), 0; }
#define UNUSED(name) \
  driver::Result name() { return 1; }
UNUSED(cuDeviceGetAttribute)
UNUSED(cuLibraryLoadData)
UNUSED(cuLibraryUnload)
UNUSED(cuLibraryGetKernel)
UNUSED(cuKernelGetAttribute)
UNUSED(cuKernelSetAttribute)
UNUSED(cuKernelGetFunction)
UNUSED(cuLaunchKernelEx)
UNUSED(cuTensorMapEncodeTiled)
UNUSED(cuTensorMapReplaceAddress)

const char* cublasLtGetStatusName(Status status) {
  return status == kNotSupported ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}
const char* cublasLtGetStatusString(Status) { return "fake"; }

// Allocates, which is not for captures.
Status cublasLtCreate(Handle* handle) {
  *handle = reinterpret_cast<Handle>(16);
  return capture_mode == driver::kRelaxedCapture ? kSuccess : 1;
}

Status cublasLtMatmulDescCreate(Operation* operation, int compute_type, int scale_type) {
  *operation = reinterpret_cast<Operation>(new Attributes);
  return compute_type == kComputeFloat32 && scale_type == kFloat32 ? kSuccess : kInvalid;
}
Status cublasLtMatmulDescDestroy(Operation operation) { return delete reinterpret_cast<Attributes*>(operation), 0; }
Status cublasLtMatmulDescSetAttribute(Operation operation, int attribute, const void* value, size_t bytes) {
  return set(reinterpret_cast<Attributes*>(operation), kOperationBytes, attribute, value, bytes);
}

Status cublasLtMatrixLayoutCreate(Layout* layout, int type, uint64_t rows, uint64_t cols, int64_t pitch) {
  *layout = reinterpret_cast<Layout>(new Matrix{type, rows, cols, pitch});
  return pitch < int64_t(rows) ? kInvalid : kSuccess;
}
Status cublasLtMatrixLayoutDestroy(Layout layout) { return delete reinterpret_cast<Matrix*>(layout), 0; }

Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = reinterpret_cast<Preference>(new Attributes);
  return kSuccess;
}
Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  return delete reinterpret_cast<Attributes*>(preference), 0;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference preference, int attribute, const void* value, size_t bytes) {
  return set(reinterpret_cast<Attributes*>(preference), kPreferenceBytes, attribute, value, bytes);
}

// An algorithm that runs where addresses are multiples of what they were asked for with.
Status cublasLtMatmulAlgoGetHeuristic(Handle handle, Operation operation, Layout a, Layout b, Layout c, Layout d,
                                      Preference preference, int count, Choice* choice, int* found) {
  const Attributes& wanted = *reinterpret_cast<Attributes*>(preference);
  const bool is_whole = of(d).type == kFloat32;  // else parts of sums are not to be rounded
  if (get<uint32_t>(wanted, kReductionSchemes) != (is_whole ? kReducesAnyhow : kReducesInFloat32)) return kInvalid;
  if (handle != reinterpret_cast<Handle>(16) || count != 1 || wanted.size() != kPreferenceBytes.size()) return kInvalid;
  const bool has_scales = get<uint64_t>(of(operation), kScaleOfA) && get<uint64_t>(of(operation), kScaleOfB);
  if (has_scales != is_fp8(of(a).type) || is_fp8(of(a).type) != is_fp8(of(b).type)) return kInvalid;
  if (get<uint32_t>(of(operation), kEpilogue) == kAddBias && !get<uint64_t>(of(operation), kBiasPointer)) return kInvalid;
  *found = 0;
  if (of(a).type == kE5M2 && of(b).type == kE5M2) return kNotSupported;
  const bool a_turned = get<int32_t>(of(operation), kTransposeA) == kTransposed;
  const bool b_turned = get<int32_t>(of(operation), kTransposeB) == kTransposed;
  if (is_fp8(of(a).type) && (!a_turned || b_turned || of(a).pitch % 16)) return kInvalid;
  if ((a_turned ? of(a).rows : of(a).cols) != (b_turned ? of(b).cols : of(b).rows) || c != d) return kInvalid;
  if (of(c).rows != (a_turned ? of(a).cols : of(a).rows)) return kInvalid;
  if (of(c).cols != (b_turned ? of(b).rows : of(b).cols)) return kInvalid;
  *found = 1;
  choice->status = kSuccess;
  choice->workspace_bytes = get<uint64_t>(wanted, kMaxWorkspaceBytes);
  const uint64_t data[8]{choice->workspace_bytes,
                         get<uint32_t>(wanted, kAlignmentOfA),
                         get<uint32_t>(wanted, kAlignmentOfB),
                         get<uint32_t>(wanted, kAlignmentOfC),
                         get<uint32_t>(wanted, kAlignmentOfD),
                         get<uint64_t>(of(operation), kBiasPointer)};
  std::memcpy(choice->algorithm.data, data, sizeof data);
  return kSuccess;
}

Status cublasLtMatmul(Handle, Operation operation, const void* alpha, const void* a, Layout a_layout, const void* b,
                      Layout b_layout, const void* beta, const void* c, Layout, void* d, Layout d_layout,
                      const Algorithm* algorithm, void* workspace, size_t workspace_bytes, Stream) {
  std::this_thread::sleep_for(std::chrono::microseconds(100));  // so that another thread may come in between
  const Attributes& how = of(operation);
  const uint64_t* wanted = algorithm->data;
  const auto address = [&](int attribute) { return reinterpret_cast<const float*>(get<uint64_t>(how, attribute)); };
  if (workspace_bytes < wanted[0] || (workspace_bytes && !workspace)) return kInvalid;
  if (!is_aligned(a, wanted[1]) || !is_aligned(b, wanted[2]) || !is_aligned(c, wanted[3]) || !is_aligned(d, wanted[4])) {
    return kInvalid;
  }
  const bool adds_bias = get<uint32_t>(how, kEpilogue) == kAddBias;
  if (adds_bias && !is_aligned(address(kBiasPointer), wanted[5])) return kInvalid;
  const auto scale_at = [&](int attribute) { return address(attribute) ? *address(attribute) : 1.0f; };
  const float scale = *static_cast<const float*>(alpha) * scale_at(kScaleOfA) * scale_at(kScaleOfB);
  const bool a_turned = get<int32_t>(how, kTransposeA) == kTransposed;
  const bool b_turned = get<int32_t>(how, kTransposeB) == kTransposed;
  const float kept = *static_cast<const float*>(beta);
  const Matrix &left = of(a_layout), &right = of(b_layout), &out = of(d_layout);
  for (uint64_t col = 0; col < out.cols; ++col) {
    for (uint64_t row = 0; row < out.rows; ++row) {
      float sum = 0;
      for (uint64_t k = 0; k < (a_turned ? left.rows : left.cols); ++k) {
        const uint64_t in_a = a_turned ? row * left.pitch + k : k * left.pitch + row;
        const uint64_t in_b = b_turned ? k * right.pitch + col : col * right.pitch + k;
        sum += read(a, left.type, in_a) * read(b, right.type, in_b);
      }
      const uint64_t at = col * out.pitch + row;
      sum = scale * sum + (kept != 0 ? kept * read(c, out.type, at) : 0);
      if (adds_bias) sum += read(address(kBiasPointer), get<int32_t>(how, kBiasType), row);
      write(d, out.type, at, sum);
    }
  }
  return kSuccess;
}

}  // extern "C"
