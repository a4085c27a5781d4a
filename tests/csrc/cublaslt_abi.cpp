// Holds csrc/host against the declarations of cuBLASLt's own cublasLt.h. Compiled by test_cublaslt_abi.py, never run.
#include <cublasLt.h>

#include "cublaslt.h"
#include "same.h"

namespace ours = te_dist::cublaslt;

// Values.
static_assert(ours::kSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(ours::kNotSupported == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(ours::kFloat32 == CUDA_R_32F);
static_assert(ours::kFloat16 == CUDA_R_16F);
static_assert(ours::kBFloat16 == CUDA_R_16BF);
static_assert(ours::kE4M3 == CUDA_R_8F_E4M3);
static_assert(ours::kE5M2 == CUDA_R_8F_E5M2);
static_assert(ours::kComputeFloat32 == CUBLAS_COMPUTE_32F);
static_assert(ours::kTransposeA == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(ours::kTransposeB == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(ours::kEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(ours::kBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(ours::kScaleOfA == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
static_assert(ours::kScaleOfB == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
static_assert(ours::kFastAccumulation == CUBLASLT_MATMUL_DESC_FAST_ACCUM);
static_assert(ours::kBiasType == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
static_assert(ours::kAsItIs == CUBLAS_OP_N);
static_assert(ours::kTransposed == CUBLAS_OP_T);
static_assert(ours::kAddBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(ours::kMaxWorkspaceBytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(ours::kReductionSchemes == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(ours::kReducesInFloat32 == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(ours::kReducesAnyhow == CUBLASLT_REDUCTION_SCHEME_MASK);
static_assert(ours::kAlignmentOfA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(ours::kAlignmentOfB == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(ours::kAlignmentOfC == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(ours::kAlignmentOfD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

// Layouts.
SAME_SIZE(ours::Algorithm, cublasLtMatmulAlgo_t);
SAME_PLACE(ours::Algorithm, data, cublasLtMatmulAlgo_t, data);
SAME_SIZE(ours::Choice, cublasLtMatmulHeuristicResult_t);
SAME_PLACE(ours::Choice, algorithm, cublasLtMatmulHeuristicResult_t, algo);
SAME_PLACE(ours::Choice, workspace_bytes, cublasLtMatmulHeuristicResult_t, workspaceSize);
SAME_PLACE(ours::Choice, status, cublasLtMatmulHeuristicResult_t, state);
SAME_PLACE(ours::Choice, waves, cublasLtMatmulHeuristicResult_t, wavesCount);
SAME_PLACE(ours::Choice, reserved, cublasLtMatmulHeuristicResult_t, reserved);

// Functions.
SAME_FUNCTION(status_name, cublasLtGetStatusName);
SAME_FUNCTION(status_text, cublasLtGetStatusString);
SAME_FUNCTION(create_handle, cublasLtCreate);
SAME_FUNCTION(create_operation, cublasLtMatmulDescCreate);
SAME_FUNCTION(destroy_operation, cublasLtMatmulDescDestroy);
SAME_FUNCTION(set_operation, cublasLtMatmulDescSetAttribute);
SAME_FUNCTION(create_layout, cublasLtMatrixLayoutCreate);
SAME_FUNCTION(destroy_layout, cublasLtMatrixLayoutDestroy);
SAME_FUNCTION(create_preference, cublasLtMatmulPreferenceCreate);
SAME_FUNCTION(destroy_preference, cublasLtMatmulPreferenceDestroy);
SAME_FUNCTION(set_preference, cublasLtMatmulPreferenceSetAttribute);
SAME_FUNCTION(choose, cublasLtMatmulAlgoGetHeuristic);
SAME_FUNCTION(multiply, cublasLtMatmul);
