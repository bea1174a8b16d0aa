// The ops of an engine that executes plans: arguments are checked, a Problem planned, its operands
// bound to slots. What remains for an engine is launch(Plan, Buffers).
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <string_view>

#include "gpu.h"
#include "plan.h"

namespace metalmm::gpu {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string_view>;

struct Engine {
  Gpu gpu;
  std::function<void(const Plan&, const Buffers&)> launch;
};

// As the schemas of ops.cpp. Tensors are on the engine's device.
at::Tensor linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                  const OptionalTensor& bias, std::string_view format, OptionalName strategy);
at::Tensor linear_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features);
at::Tensor swiglu(const Engine& e, const at::Tensor& x, const at::Tensor& gate_weight,
                  const at::Tensor& up_weight, std::string_view format_gate,
                  std::string_view format_up);
at::Tensor swiglu_linear(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& weight, const OptionalTensor& bias,
                         std::string_view format);
// gemv (dim 1) and gemm (dim 2)
at::Tensor scaled_matmul(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         std::string_view format, const OptionalTensor& c, double alpha,
                         double beta, OptionalName strategy, int64_t dim);
at::Tensor dequantize(const Engine& e, const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype);
at::Tensor embedding(const Engine& e, const at::Tensor& ids, const at::Tensor& weight,
                     std::string_view format, std::optional<int64_t> in_features,
                     std::optional<at::ScalarType> dtype);

}  // namespace metalmm::gpu
