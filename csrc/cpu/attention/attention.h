// Attention and what it is given, on CPU tensors. As ops/ops.def.
#pragma once

#include "ops/attention/checks.h"

namespace metalmm::cpu {

Heads rope(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
           int64_t kv_heads, const OptionalTensor& v, const OptionalTensor& q_norm,
           const OptionalTensor& k_norm, double eps, double offset, bool interleaved);

// These fail as append_rows does.
at::Tensor rope_append(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                       int64_t heads, int64_t kv_heads, const at::Tensor& keys,
                       const at::Tensor& values, const at::Tensor& slots, std::string_view format_k,
                       std::string_view format_v, const OptionalTensor& v,
                       const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                       double offset, bool interleaved);
void cache_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k,
                  const at::Tensor& v, const at::Tensor& slots, std::string_view format_k,
                  std::string_view format_v);

at::Tensor attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                     std::string_view format_k, std::string_view format_v, const at::Tensor& length,
                     const OptionalTensor& mask, std::optional<double> scale, double softcap,
                     int64_t window, const OptionalTensor& sinks, bool causal,
                     OptionalName strategy);

}  // namespace metalmm::cpu
