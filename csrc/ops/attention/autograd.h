// The Autograd kernels of the ops on a cache.
#pragma once

#include "calls.h"

namespace metalmm::gradients {

// Through keys and values of a dense format, and what they are multiplied by, a gradient is that of
// composed::attention; a packed cache has none.
Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, Name format_k,
                 Name format_v, const OptionalTensor& length, const OptionalTensor& mask,
                 std::optional<double> scale, double softcap, int64_t window,
                 const OptionalTensor& sinks, bool causal, OptionalName strategy);

void cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                  const Tensor& slots, Name format_k, Name format_v);

// In place of torch's fallback for negated and conjugate views, which takes the first result of an
// op for granted: such k and v are computed, such caches refused.
void cache_append_of_views(const Tensor& keys, const Tensor& values, const Tensor& k,
                           const Tensor& v, const Tensor& slots, Name format_k, Name format_v);

Tensor rope_append(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads,
                   int64_t kv_heads, const Tensor& keys, const Tensor& values, const Tensor& slots,
                   Name format_k, Name format_v, const OptionalTensor& v,
                   const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                   double offset, bool interleaved);

}  // namespace metalmm::gradients
