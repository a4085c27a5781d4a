// One step of Adam over many tensors, a chunk of elements at a time.
#include <cstring>

#include "elements.h"
#include "kernels_of_level.h"
#include "parallel.h"

namespace te_dist::cpu::TE_DIST_ISA {
namespace {

template <class Element>
typename Element::Storage* at(const void* first, int64_t index) {
  return static_cast<typename Element::Storage*>(const_cast<void*>(first)) + index;
}

// kLanes elements.
template <class Grad, class Value>
void update_lanes(const AdamFactors& factors, const typename Grad::Storage* grad, typename Value::Storage* value,
                  float* exp_avg, float* exp_avg_sq) {
  AdamState<F32> state{Value::load_lanes(value), load<F32>(exp_avg), load<F32>(exp_avg_sq)};
  adam_update(factors, Grad::load_lanes(grad), state);
  Value::store_lanes(value, state.value);
  store(exp_avg, state.exp_avg);
  store(exp_avg_sq, state.exp_avg_sq);
}

// Fewer than kLanes elements.
template <class Grad, class Value>
void update_rest(const AdamFactors& factors, const AdamTensor& t, int64_t first, size_t count) {
  typename Grad::Storage grad[kLanes] = {};
  typename Value::Storage value[kLanes] = {};
  float exp_avg[kLanes] = {}, exp_avg_sq[kLanes] = {};
  std::memcpy(grad, at<Grad>(t.grad, first), count * sizeof grad[0]);
  std::memcpy(value, at<Value>(t.value, first), count * sizeof value[0]);
  std::memcpy(exp_avg, t.exp_avg + first, count * sizeof(float));
  std::memcpy(exp_avg_sq, t.exp_avg_sq + first, count * sizeof(float));
  update_lanes<Grad, Value>(factors, grad, value, exp_avg, exp_avg_sq);
  std::memcpy(at<Value>(t.value, first), value, count * sizeof value[0]);
  std::memcpy(t.exp_avg + first, exp_avg, count * sizeof(float));
  std::memcpy(t.exp_avg_sq + first, exp_avg_sq, count * sizeof(float));
}

template <class Grad, class Value>
void update(const AdamFactors& factors, const AdamTensor& t, int64_t first, int64_t stop) {
  for (; first + kLanes <= stop; first += kLanes) {
    update_lanes<Grad, Value>(factors, at<Grad>(t.grad, first), at<Value>(t.value, first), t.exp_avg + first,
                              t.exp_avg_sq + first);
  }
  if (first < stop) update_rest<Grad, Value>(factors, t, first, size_t(stop - first));
}

template <class Value, class Copy>
void copy(const AdamTensor& t, int64_t first, int64_t stop) {
  for (; first + kLanes <= stop; first += kLanes) {
    Copy::store_lanes(at<Copy>(t.copy, first), Value::load_lanes(at<Value>(t.value, first)));
  }
  if (first == stop) return;
  const size_t count = size_t(stop - first);
  typename Value::Storage value[kLanes] = {};
  typename Copy::Storage copied[kLanes];
  std::memcpy(value, at<Value>(t.value, first), count * sizeof value[0]);
  Copy::store_lanes(copied, Value::load_lanes(value));
  std::memcpy(at<Copy>(t.copy, first), copied, count * sizeof copied[0]);
}

}  // namespace

void multi_adam(const MultiAdam& op, int threads) {
  parallel_for(op.num_tensors ? op.ends[op.num_tensors - 1] : 0, threads, [&](int64_t chunk) {
    int64_t index = 0;
    for (int64_t count = op.num_tensors; count > 1;) {  // the first end behind the chunk
      const int64_t half = count / 2;
      const bool is_later = op.ends[index + half - 1] <= chunk;
      index += is_later ? half : 0;
      count = is_later ? count - half : half;
    }
    const AdamTensor& t = op.tensors[index];
    const int64_t first = (chunk - (index ? op.ends[index - 1] : 0)) * kAdamChunk;
    const int64_t stop = first + kAdamChunk < t.count ? first + kAdamChunk : t.count;
    with_element(t.value_type, [&](auto value) {
      using Value = decltype(value);
      with_element(t.grad_type, [&](auto grad) { update<decltype(grad), Value>(op.factors[index], t, first, stop); });
      if (t.copy) with_element(t.copy_type, [&](auto type) { copy<Value, decltype(type)>(t, first, stop); });
    });
  });
}

}  // namespace te_dist::cpu::TE_DIST_ISA
