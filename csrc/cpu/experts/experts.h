// The ops on experts, on CPU tensors: rows of x by expert, a matrix product for each. Arguments as
// in ops/ops.def.
#pragma once

#include <ATen/ATen.h>

#include "ops/checks.h"

namespace metalmm::cpu {

at::Tensor expert_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                         const OptionalTensor& bias, std::string_view format,
                         const OptionalTensor& scores, OptionalName strategy,
                         OptionalName activations);
at::Tensor expert_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                             const at::Tensor& ids, std::string_view format, int64_t in_features);
at::Tensor expert_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                         const OptionalTensor& bias, std::string_view format,
                         std::string_view activation, bool interleaved,
                         const OptionalTensor& up_weight, std::optional<double> limit, double alpha,
                         OptionalName strategy, OptionalName activations);

}  // namespace metalmm::cpu
