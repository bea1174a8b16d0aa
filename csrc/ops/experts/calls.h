// The ops on experts, called through the dispatcher.
#pragma once

#include <utility>

#include "ops/op_calls.h"

namespace metalmm {

// The arguments of expert_swiglu behind `format`, but for strategy and activations.
struct GateOptions {
  Name activation;
  bool interleaved;
  OptionalTensor up_weight;
  std::optional<double> limit;
  double alpha;
};

inline Tensor call_expert_linear(const Tensor& x, const Tensor& w, const Tensor& ids,
                                 const OptionalTensor& bias, Name format,
                                 const OptionalTensor& scores = std::nullopt,
                                 OptionalName strategy = std::nullopt,
                                 OptionalName activations = std::nullopt) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Name,
                     const OptionalTensor&, OptionalName, OptionalName)>("metalmm::expert_linear");
  return op.call(x, w, ids, bias, format, scores, strategy, activations);
}

inline Tensor call_expert_input_grad(const Tensor& grad, const Tensor& w, const Tensor& ids,
                                     Name format, int64_t in_features) {
  static auto op = find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, Name, int64_t)>(
      "metalmm::expert_input_grad");
  return op.call(grad, w, ids, format, in_features);
}

inline Tensor call_expert_swiglu(const Tensor& x, const Tensor& w, const Tensor& ids,
                                 const OptionalTensor& bias, Name format, const GateOptions& o,
                                 OptionalName strategy, OptionalName activations) {
  static auto op = find_op<Tensor(const Tensor&, const Tensor&, const Tensor&,
                                  const OptionalTensor&, Name, Name, bool, const OptionalTensor&,
                                  std::optional<double>, double, OptionalName, OptionalName)>(
      "metalmm::expert_swiglu");
  return op.call(x, w, ids, bias, format, o.activation, o.interleaved, o.up_weight, o.limit,
                 o.alpha, strategy, activations);
}

}  // namespace metalmm
