// The Autograd kernels of the ops on experts; arguments as in ops.def.
#pragma once

#include "calls.h"

namespace metalmm::gradients {

Tensor expert_linear(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, const OptionalTensor& scores,
                     OptionalName strategy, OptionalName activations);
Tensor expert_input_grad(const Tensor& grad, const Tensor& w, const Tensor& ids, Name format,
                         int64_t in_features);
Tensor expert_swiglu(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, Name activation, bool interleaved,
                     const OptionalTensor& up_weight, std::optional<double> limit, double alpha,
                     OptionalName strategy, OptionalName activations);

}  // namespace metalmm::gradients
