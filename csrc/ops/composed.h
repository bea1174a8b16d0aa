// The ops between the matrix products, of torch's own ops: in f32, rounded once, differentiable.
// Autograd runs them where a gradient is recorded.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "checks.h"
#include "op_calls.h"

namespace metalmm::composed {

at::Tensor activate(const at::Tensor& gate, Activation activation);

// The derivative of the activation at gate, f32.
at::Tensor slope(const at::Tensor& gate, Activation activation);

// f32, whatever the dtype of x is.
at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, double offset);

// Arguments as those of the op; results in the dtype of qkv.
Heads rope(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
           int64_t kv_heads, const OptionalTensor& v, const OptionalTensor& q_norm,
           const OptionalTensor& k_norm, double eps, double offset, bool interleaved);

}  // namespace metalmm::composed
