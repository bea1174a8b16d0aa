// The arguments of the ops on experts, checked as ops/checks.h says.
#pragma once

#include "calls.h"
#include "ops/checks.h"

namespace metalmm {

struct ExpertShape {
  WeightShape weight;  // of an expert: n rows of k values
  c10::SymInt experts, tokens, choices;
};
ExpertShape check_expert_linear(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& ids, const OptionalTensor& bias,
                                std::string_view format, const OptionalTensor& scores);

// How gate and up become one: activation(gate) * up, or as ops.def has swiglu_oai.
struct Gate {
  Activation activation;
  bool is_oai;
  std::optional<double> limit;
  double alpha;
};
struct GatedShape {
  ExpertShape experts;  // n: rows of gate, and of up
  Gate gate;
};
GatedShape check_expert_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                               const OptionalTensor& bias, std::string_view format,
                               const GateOptions& options);

// grad [T, C, N]
ExpertShape check_expert_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                                    const at::Tensor& ids, std::string_view format,
                                    const c10::SymInt& in_features);

}  // namespace metalmm
