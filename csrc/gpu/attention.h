// The ops on a cache, of torch's ops and of dequantize. As ops/ops.def.
#pragma once

#include "ops.h"

namespace metalmm::gpu {

// Slots are not checked, which would wait for the device.
void cache_append(const Engine& e, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots,
                  std::string_view format_k, std::string_view format_v);

at::Tensor rope_append(const Engine& e, const at::Tensor& qkv, const at::Tensor& cos,
                       const at::Tensor& sin, int64_t heads, int64_t kv_heads,
                       const at::Tensor& keys, const at::Tensor& values, const at::Tensor& slots,
                       std::string_view format_k, std::string_view format_v,
                       const OptionalTensor& v, const OptionalTensor& q_norm,
                       const OptionalTensor& k_norm, double eps, double offset, bool interleaved);

// Nor is length, where there is one: the slots that are read are those below it that the cache and
// the mask have.
at::Tensor attention(const Engine& e, const at::Tensor& q, const at::Tensor& keys,
                     const at::Tensor& values, std::string_view format_k, std::string_view format_v,
                     const OptionalTensor& length, const OptionalTensor& mask,
                     std::optional<double> scale, double softcap, int64_t window,
                     const OptionalTensor& sinks, bool causal, OptionalName strategy);

}  // namespace metalmm::gpu
