// The ops between the matrix products, of torch's own ops: in f32, rounded once, differentiable.
// Autograd runs them where a gradient is recorded.
#pragma once

#include <tuple>

#include "checks.h"

namespace metalmm::composed {

at::Tensor activate(const at::Tensor& gate, Activation activation);

// cap tanh(y / cap)
at::Tensor soft_cap(const at::Tensor& y, double cap);

// The derivative of the activation at gate, f32.
at::Tensor slope(const at::Tensor& gate, Activation activation);

// f32, whatever the dtype of x is.
at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, double offset);

// f32 [..., D].
at::Tensor hadamard(const at::Tensor& x);

// Arguments as those of the op; results in the dtype of qkv.
Heads rope(const args::rope& a, bool has_whole_norms);

// The ops for at least one position; the state is written.
at::Tensor causal_conv(const args::causal_conv& a);
at::Tensor gated_delta(const args::gated_delta& a);
at::Tensor ssm_scan(const args::ssm_scan& a);

}  // namespace metalmm::composed
