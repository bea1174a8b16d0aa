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

// Torch's attention takes many queries of f32, and of bf16 on a machine that multiplies bf16, whose
// keys and values are dense and of their dtype. Its time over that of the matrices here (Zen 5, one
// thread, 32 heads of q and 8 of keys of 128 values, f32): 0.44 at 17 queries of 17 slots, 0.75 at
// 128 of 128, 1.02 at 512 of 512, 0.81 at 512 of 2048; bf16 0.53, 0.82, 1.08, 0.85. Of f16 it takes
// 2.8 times as long (bench/results.md).
AttentionWay choose_way(const Problem& problem);

at::Tensor attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                     std::string_view format_k, std::string_view format_v,
                     const OptionalTensor& length, const OptionalTensor& mask,
                     std::optional<double> scale, double softcap, int64_t window,
                     const OptionalTensor& sinks, bool causal, OptionalName strategy);

}  // namespace metalmm::cpu
