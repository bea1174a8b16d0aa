// The arguments of the ops on experts, checked as ops/checks.h says.
#pragma once

#include "ops/checks.h"

namespace metalmm {

struct ExpertShape {
  WeightShape weight;  // an expert's: n rows of k values
  c10::SymInt experts, tokens, choices;
};
ExpertShape check(const args::expert_linear& a);

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
GatedShape check(const args::expert_swiglu& a);

// grad [T, C, N]
ExpertShape check(const args::expert_input_grad& a);

// Tokens and experts of route, the weights of its products where it has any.
struct RouteShape {
  c10::SymInt tokens, experts;
  std::optional<WeightShape> weight, shared_weight;
  bool is_sigmoid;
  int64_t choices;  // choices of a token, the shared expert among them
};
RouteShape check(const args::route& a);

// The weight of route and behind it the shared expert's row, a view, where it lies there.
OptionalTensor with_shared_row(const args::route& a);

}  // namespace metalmm
