// The ops on a cache, called through the dispatcher.
#pragma once

#include <algorithm>
#include <utility>

#include "ops/op_calls.h"
#include "plan/format.h"  // kMaxK

namespace metalmm {

// The arguments of attention behind `length`.
struct AttentionOptions {
  OptionalTensor mask;
  std::optional<double> scale;
  double softcap;
  int64_t window;  // at most kMaxK, as many slots as any cache has: sums with it do not overflow
  OptionalTensor sinks;
  bool causal;
  OptionalName strategy;

  AttentionOptions(OptionalTensor mask, std::optional<double> scale, double softcap, int64_t window,
                   OptionalTensor sinks, bool causal, OptionalName strategy)
      : mask(std::move(mask)),
        scale(scale),
        softcap(softcap),
        window(std::min(window, kMaxK)),
        sinks(std::move(sinks)),
        causal(causal),
        strategy(strategy) {}
};

// The arguments of rope_append behind `format_v`.
struct RopeOptions {
  OptionalTensor v, q_norm, k_norm;
  double eps = 0, offset = 0;
  bool interleaved = false;
};

inline Tensor call_rope_append(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                               int64_t heads, int64_t kv_heads, const Tensor& keys,
                               const Tensor& values, const Tensor& slots, Name format_k,
                               Name format_v, const RopeOptions& o) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, const Tensor&,
                     const Tensor&, const Tensor&, Name, Name, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&, double, double, bool)>(
          "metalmm::rope_append");
  return op.call(qkv, cos, sin, heads, kv_heads, keys, values, slots, format_k, format_v, o.v,
                 o.q_norm, o.k_norm, o.eps, o.offset, o.interleaved);
}

inline Tensor call_attention(const Tensor& q, const Tensor& keys, const Tensor& values,
                             Name format_k, Name format_v, const OptionalTensor& length,
                             const AttentionOptions& o) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, Name, Name, const OptionalTensor&,
                     const OptionalTensor&, std::optional<double>, double, int64_t,
                     const OptionalTensor&, bool, OptionalName)>("metalmm::attention");
  return op.call(q, keys, values, format_k, format_v, length, o.mask, o.scale, o.softcap, o.window,
                 o.sinks, o.causal, o.strategy);
}

inline void call_cache_append(const Tensor& keys, const Tensor& values, const Tensor& k,
                              const Tensor& v, const Tensor& slots, Name format_k, Name format_v) {
  static auto op = find_op<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                const Tensor&, Name, Name)>("metalmm::cache_append");
  op.call(keys, values, k, v, slots, format_k, format_v);
}

}  // namespace metalmm
