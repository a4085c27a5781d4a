// te_dist._C: the kernels as Python functions of tensors. Arguments are checked by the callers in te_dist/ops.
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <utility>

#include "../cpu/assemble.h"
#include "../cpu/dispatch.h"
#include "host.h"
#include "tensor_ref.h"

namespace py = pybind11;
using namespace te_dist::cpu;
using te_dist::TensorRef;

namespace {

using Pair = std::pair<int64_t, int64_t>;
using Direction = std::tuple<Pair, TensorRef, TensorRef, TensorRef>;                  // tile, amax, data, scale
using Read = std::tuple<TensorRef, std::string, std::vector<TensorRef>>;  // x, what is computed from it, with what beside
using NvFp4Direction = std::tuple<Pair, TensorRef, TensorRef, TensorRef, TensorRef>;  // tile, tensor amax, amax, ...

constexpr char kGathered[] = "gathered ";  // in front of the name of a source whose rows are gathered

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kParallelElements = 256 * 1024;

int threads_for(int64_t elements, int threads) { return elements < kParallelElements ? 1 : threads; }

Phase phase_of(Pair pair) { return {pair.first, pair.second}; }
Tile tile_of(Pair pair) { return {pair.first, pair.second}; }

// An offset counts modulo the tile; it means nothing where a tile is the entire dimension.
Phase phase_in(Pair tile, Pair phase) {
  return {tile.first ? phase.first % tile.first : 0, tile.second ? phase.second % tile.second : 0};
}

Fp8 fp8_of(const std::string& name) {
  if (name == "e4m3") return Fp8::kE4M3;
  if (name == "e5m2") return Fp8::kE5M2;
  throw py::value_error("fp8 is 'e4m3' or 'e5m2', got '" + name + "'");
}

FourOverSix four_over_six_of(const std::string& name) {
  if (name == "none") return FourOverSix::kNone;
  if (name == "mae") return FourOverSix::kMeanAbsolute;
  if (name == "mse") return FourOverSix::kMeanSquare;
  throw py::value_error("four_over_six is 'none', 'mae' or 'mse', got '" + name + "'");
}

// Rows of `x` by their numbers, a vector.
Source gather(Source x, const TensorRef& index) {
  x.index = {index.data, index.itemsize == sizeof(int64_t), x.rows};
  x.rows = index.shape[1];
  return x;
}

Source source_of(const Read& read) {
  const auto& [x, name, beside] = read;
  if (const size_t prefix = sizeof kGathered - 1; name.compare(0, prefix, kGathered) == 0) {
    return gather(source_of({x, name.substr(prefix), beside}), beside.back());
  }
  Source source{x.data, x.dtype, x.shape[0], x.shape[1]};
  if (name == "plain") return source;
  if (name == "swiglu" || name == "weighted_swiglu") {
    source.kind = Source::Kind::kSwiGlu;
    source.cols /= 2;
    if (name == "weighted_swiglu") source.probability = beside.at(0).pointer<const float>();
    return source;
  }
  source.beside = beside.at(0).data;
  if (name == "swiglu_gradient" || name == "weighted_swiglu_gradient") {
    source.kind = Source::Kind::kSwiGluGradient;
    if (name == "weighted_swiglu_gradient") source.probability = beside.at(1).pointer<const float>();
    return source;
  }
  const bool is_centered = name == "zero_centered_rms_norm";
  if (!is_centered && name != "rms_norm") throw py::value_error("no source '" + name + "'");
  source.kind = is_centered ? Source::Kind::kZeroCenteredRmsNorm : Source::Kind::kRmsNorm;
  source.gamma = beside.at(1).matrix();
  return source;
}

int64_t numel(const Source& x) { return x.rows * x.cols; }

template <class Scale>
BlockOutput<Scale> block_output(const Pair& tile, const TensorRef& amax, const TensorRef& data,
                                const TensorRef& scale) {
  return {tile_of(tile), amax.plane<const float>(), data.pointer<uint8_t>(), scale.plane<Scale>()};
}

template <class Scale>
BlockOutput<Scale> block_output(const Direction& direction) {
  const auto& [tile, amax, data, scale] = direction;
  return block_output<Scale>(tile, amax, data, scale);
}

void tile_amax(const Read& read, Pair phase, Pair tile, const TensorRef& out, int threads) {
  const Source x = source_of(read);
  kernels().tile_amax({x, phase_in(tile, phase), tile_of(tile), out.pointer<float>()},
                      threads_for(numel(x), threads));
}

void quantize_float8_tensor(const Read& read, const TensorRef& scale, const std::string& fp8,
                            const TensorRef& row_data, const TensorRef& col_data, int threads) {
  const Source x = source_of(read);
  kernels().quantize_float8_tensor(
      {x, *scale.pointer<float>(), fp8_of(fp8), row_data.pointer<uint8_t>(), col_data.pointer<uint8_t>()},
      threads_for(numel(x), threads));
}

void quantize_float8_block(const Read& read, Pair phase, const std::string& fp8, std::pair<bool, float> pow2_eps,
                           const Direction& row, const Direction& col, int threads) {
  const Source x = source_of(read);
  kernels().quantize_float8_block({x, phase_of(phase), fp8_of(fp8), pow2_eps.first, pow2_eps.second,
                                   block_output<float>(row), block_output<float>(col)},
                                  threads_for(numel(x), threads));
}

void quantize_mxfp8(const Read& read, Pair phase, const std::string& fp8, const Direction& row, const Direction& col,
                    int threads) {
  const Source x = source_of(read);
  kernels().quantize_mxfp8(
      {x, phase_of(phase), fp8_of(fp8), block_output<uint8_t>(row), block_output<uint8_t>(col)},
      threads_for(numel(x), threads));
}

void quantize_nvfp4(const Read& read, Pair phase, std::pair<int, std::string> e4m3_max_four_over_six,
                    const NvFp4Direction& row, const NvFp4Direction& col, const TensorRef& rng_state, int threads) {
  const Source x = source_of(read);
  const auto& [row_tile, row_tensor_amax, row_amax, row_data, row_scale] = row;
  const auto& [col_tile, col_tensor_amax, col_amax, col_data, col_scale] = col;
  QuantizeNvFp4 op{};
  op.x = x;
  op.phase = phase_of(phase);
  op.e4m3_max = e4m3_max_four_over_six.first;
  op.four_over_six = four_over_six_of(e4m3_max_four_over_six.second);
  op.row = block_output<uint8_t>(row_tile, row_amax, row_data, row_scale);
  op.col = block_output<uint8_t>(col_tile, col_amax, col_data, col_scale);
  op.row_tensor_amax = row_tensor_amax.plane<const float>();
  op.col_tensor_amax = col_tensor_amax.plane<const float>();
  op.rng_state = rng_state.pointer<const int64_t>();
  kernels().quantize_nvfp4(op, threads_for(numel(x), threads));
}

void evaluate(const Read& read, const TensorRef& out, int threads) {
  kernels().evaluate({source_of(read), out.data}, threads_for(out.numel(), threads));
}

void panel_sums(const Read& read, const TensorRef& out, int threads) {
  const Source x = source_of(read);
  kernels().panel_sums({x, out.pointer<float>()}, threads_for(numel(x), threads));
}

void row_sums(const Read& read, const TensorRef& out, int threads) {
  const Source x = source_of(read);
  kernels().row_sums({x, out.pointer<float>()}, threads_for(numel(x), threads));
}

void rms_rstd(const TensorRef& x, float eps, const TensorRef& out, int threads) {
  kernels().rms_rstd({x.matrix(), eps, out.pointer<float>()}, threads_for(x.numel(), threads));
}

void hadamard(const TensorRef& x, int64_t sign_mask, const TensorRef& out, int threads) {
  kernels().hadamard({x.matrix(), uint32_t(sign_mask), out.pointer<uint16_t>()}, threads_for(x.numel(), threads));
}

void dequantize_float8(const TensorRef& data, const TensorRef& scale, Pair tile, Pair phase, const std::string& fp8,
                       const TensorRef& out, int threads) {
  kernels().dequantize_float8({data.plane<const uint8_t>(), scale.plane<const float>(), tile_of(tile),
                               phase_in(tile, phase), fp8_of(fp8), out.matrix()},
                              threads_for(out.numel(), threads));
}

void dequantize_mxfp8(const TensorRef& data, const TensorRef& scale, Pair grain, Pair phase, const std::string& fp8,
                      const TensorRef& out, int threads) {
  kernels().dequantize_mxfp8({data.plane<const uint8_t>(), scale.plane<const uint8_t>(), tile_of(grain),
                              phase_in(grain, phase), fp8_of(fp8), out.matrix()},
                             threads_for(out.numel(), threads));
}

void dequantize_nvfp4(const TensorRef& data, const TensorRef& scale, const TensorRef& amax, Pair packed_dim_e4m3_max,
                      Pair grain, Pair phase, const TensorRef& out, int threads) {
  kernels().dequantize_nvfp4(
      {data.pointer<const uint8_t>(), int(packed_dim_e4m3_max.first), scale.plane<const uint8_t>(), tile_of(grain),
       phase_in(grain, phase), amax.plane<const float>(), int(packed_dim_e4m3_max.second), out.matrix()},
      threads_for(out.numel(), threads));
}

void transpose(const TensorRef& src, int bits, const TensorRef& out, int threads) {
  const int pack = bits == 4 ? 2 : 1;
  const int64_t rows = src.shape[0], cols = out.shape[0];
  kernels().transpose({src.data, out.data, bits, rows, cols, pack * src.shape[1], pack * out.shape[1]},
                      threads_for(rows * cols, threads));
}

void assemble(const std::vector<TensorRef>& wires, const std::vector<int64_t>& row_starts,
              const std::vector<int64_t>& col_starts, const TensorRef& out, int threads) {
  Assemble op{{}, out.data, out.stride[0] * out.itemsize};
  for (size_t i = 0; i < wires.size(); ++i) {
    const TensorRef& wire = wires[i];
    if (!wire.numel()) continue;
    op.parts.push_back({wire.data, wire.stride[0] * wire.itemsize, wire.shape[0], wire.shape[1] * wire.itemsize,
                        row_starts[i], col_starts[i] * out.itemsize});
  }
  copy_parts(op, threads_for(out.numel(), threads));
}

// One matrix for each member; `dim` is cut: members (0), lines (1), or values of a line (2).
void assemble_chunks(const TensorRef& gathered, const std::array<int64_t, 4>& cut, int dim,
                     const std::vector<TensorRef>& members, int threads) {
  const Chunking chunks{cut[0], cut[1], cut[2], cut[3]};
  for (size_t member = 0; member < members.size(); ++member) {
    const TensorRef& out = members[member];
    const int64_t lines = out.shape[0], line_bytes = out.shape[1] * out.itemsize, index = int64_t(member);
    Assemble op{{}, out.data, out.stride[0] * out.itemsize};
    for (int64_t chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
      const int64_t begin = chunks.begin(chunk), count = chunks.end(chunk) - begin;
      const char* data = gathered.data + chunk * gathered.stride[0];
      if (dim == 0 && begin <= index && index < begin + count) {
        op.parts.push_back({data + (index - begin) * lines * line_bytes, line_bytes, lines, line_bytes, 0, 0});
      } else if (dim == 1) {
        op.parts.push_back({data + index * count * line_bytes, line_bytes, count, line_bytes, begin, 0});
      } else if (dim == 2) {
        const int64_t bytes = count * out.itemsize;
        op.parts.push_back({data + index * lines * bytes, bytes, lines, bytes, 0, begin * out.itemsize});
      }
    }
    copy_parts(op, threads_for(out.numel(), threads));
  }
}

// value, exp_avg, exp_avg_sq, grad, step, copy
using AdamArguments = std::tuple<TensorRef, TensorRef, TensorRef, TensorRef, TensorRef, TensorRef>;

te_dist::AdamRule rule_of(const std::array<double, 7>& rule) {
  const auto [lr, beta1, beta2, eps, weight_decay, decoupled, corrected] = rule;
  return {lr, beta1, beta2, eps, weight_decay, decoupled, corrected};
}

void multi_adam(const std::vector<AdamArguments>& arguments, std::array<double, 7> rule, float grad_scale,
                int threads) {
  const te_dist::AdamRule adam = rule_of(rule);
  std::vector<AdamTensor> tensors;
  std::vector<te_dist::AdamFactors> factors;
  std::vector<int64_t> ends;
  int64_t elements = 0, chunks = 0;
  for (const auto& [value, exp_avg, exp_avg_sq, grad, step, copy] : arguments) {
    const float number = *step.pointer<float>() += 1.0f;
    factors.push_back(adam_factors(adam, adam.lr, number, grad_scale));
    tensors.push_back({value.data, value.dtype, grad.data, grad.dtype, exp_avg.pointer<float>(),
                       exp_avg_sq.pointer<float>(), copy.data, copy.dtype, value.numel()});
    elements += value.numel();
    chunks += (value.numel() + kAdamChunk - 1) / kAdamChunk;
    ends.push_back(chunks);
  }
  kernels().multi_adam({tensors.data(), factors.data(), ends.data(), int64_t(tensors.size())},
                       threads_for(elements, threads));
}

// value, exp_avg, exp_avg_sq, grad, step, copy; scales of the moments, the remainder; seed, number, origin, width, pitch;
// whether the value is rounded by chance
using CompactArguments = std::tuple<TensorRef, TensorRef, TensorRef, TensorRef, TensorRef, TensorRef, TensorRef, TensorRef,
                                    TensorRef, std::array<uint64_t, 5>, bool>;

void multi_adam_compact(const std::vector<CompactArguments>& arguments, std::array<double, 7> rule, float grad_scale,
                        int threads) {
  const te_dist::AdamRule adam = rule_of(rule);
  std::vector<CompactTensor> tensors;
  std::vector<te_dist::AdamFactors> factors;
  std::vector<int64_t> ends;
  int64_t elements = 0, blocks = 0;
  for (const auto& [value, exp_avg, exp_avg_sq, grad, step, copy, first_scale, second_scale, remainder, places, by_chance] :
       arguments) {
    const auto [seed, number, origin, width, pitch] = places;
    const float count = *step.pointer<float>() += 1.0f;
    factors.push_back(adam_factors(adam, adam.lr, count, grad_scale));
    const Keep keep = remainder.data ? Keep::kRemainder : by_chance ? Keep::kStochastic : Keep::kNearest;
    tensors.push_back({value.matrix(), keep, remainder.pointer<uint16_t>(), grad.matrix(), exp_avg.matrix(),
                       first_scale.pointer<float>(), exp_avg_sq.matrix(), second_scale.pointer<float>(), copy.matrix(),
                       te_dist::AdamNoise{seed, number, origin, width, pitch}, uint32_t(count)});
    elements += value.numel();
    blocks += value.shape[0] * ((value.shape[1] + te_dist::kMomentBlock - 1) / te_dist::kMomentBlock);
    ends.push_back(blocks);
  }
  kernels().multi_adam_compact({tensors.data(), factors.data(), ends.data(), int64_t(tensors.size())},
                               threads_for(elements, threads));
}

// score function, whether it normalizes, groups, groups that are chosen, factor
using RuleArguments = std::tuple<std::string, bool, int64_t, int64_t, float>;

RoutingRule routing_rule(const RuleArguments& rule) {
  const auto& [score, normalizes, num_groups, top_groups, factor] = rule;
  if (score != "softmax" && score != "sigmoid") throw py::value_error("score is 'softmax' or 'sigmoid', got '" + score + "'");
  const te_dist::Score its = score == "softmax" ? te_dist::Score::kSoftmax : te_dist::Score::kSigmoid;
  return {its, normalizes, factor, num_groups, top_groups};
}

void route(const TensorRef& logits, const TensorRef& bias, const RuleArguments& rule,
           const std::array<TensorRef, 4>& outputs, int threads) {
  const auto& [experts, probabilities, scores, counts] = outputs;
  kernels().route({logits.pointer<const float>(), bias.pointer<const float>(), logits.shape[0], logits.shape[1],
                   experts.shape[1], routing_rule(rule), experts.pointer<int64_t>(), probabilities.pointer<float>(),
                   scores.pointer<float>(), counts.pointer<float>()},
                  threads_for(logits.numel(), threads));
}

void route_gradient(const TensorRef& logits, const TensorRef& experts, const TensorRef& grad, const TensorRef& of_scores,
                    const RuleArguments& rule, const TensorRef& out, int threads) {
  kernels().route_gradient({logits.pointer<const float>(), experts.pointer<const int64_t>(), grad.pointer<const float>(),
                            of_scores.pointer<const float>(), logits.shape[0], logits.shape[1], experts.shape[1],
                            routing_rule(rule), out.dtype == DType::kBFloat16, out.data},
                           threads_for(logits.numel(), threads));
}

template <class Function>
void define(py::module_& module, const char* name, Function function) {
  module.def(name, function, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled CPU kernels of te_dist, and the launcher of its CUDA kernels.";
  module.def("simd_levels", &simd_levels, "Names of the SIMD levels this CPU can run, the slowest first.");
  module.def("simd_level", &simd_level, "The level in use.");
  module.def("set_simd_level", &set_simd_level, "Switches to another level; for tests and benchmarks.");
  define(module, "tile_amax", &tile_amax);
  define(module, "quantize_float8_tensor", &quantize_float8_tensor);
  define(module, "quantize_float8_block", &quantize_float8_block);
  define(module, "quantize_mxfp8", &quantize_mxfp8);
  define(module, "quantize_nvfp4", &quantize_nvfp4);
  define(module, "hadamard", &hadamard);
  define(module, "evaluate", &evaluate);
  define(module, "panel_sums", &panel_sums);
  define(module, "row_sums", &row_sums);
  define(module, "rms_rstd", &rms_rstd);
  define(module, "dequantize_float8", &dequantize_float8);
  define(module, "dequantize_mxfp8", &dequantize_mxfp8);
  define(module, "dequantize_nvfp4", &dequantize_nvfp4);
  define(module, "transpose", &transpose);
  define(module, "assemble", &assemble);
  define(module, "assemble_chunks", &assemble_chunks);
  define(module, "multi_adam", &multi_adam);
  define(module, "multi_adam_compact", &multi_adam_compact);
  define(module, "route", &route);
  define(module, "route_gradient", &route_gradient);
  te_dist::define_host(module);
}
