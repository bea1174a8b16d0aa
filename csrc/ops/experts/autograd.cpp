#include "autograd.h"

#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "checks.h"
#include "composed.h"
#include "ops/gradients.h"
#include "ops/strategies.h"
#include "ops/tensors.h"

namespace metalmm::gradients {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t size_of(const Tensor& t, int64_t dim) {
  return t.sym_size(dim).guard_int(__FILE__, __LINE__);
}

struct ExpertLinear : torch::autograd::Function<ExpertLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const Tensor& ids,
                        const OptionalTensor& bias, std::string format,
                        const OptionalTensor& scores, std::optional<std::string> strategy,
                        std::optional<std::string> activations) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto kept = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
    // x is only read for the gradient of scores.
    ctx->save_for_backward({needs_grad(scores) ? x : Tensor(), w, ids, kept(bias), kept(scores)});
    // needs_input_grad() counts the tensors that are there.
    ctx->saved_data["of_bias"] = needs_grad(bias);
    ctx->saved_data["of_scores"] = needs_grad(scores);
    ctx->saved_data["format"] = format;
    ctx->saved_data["activations"] = activations;
    ctx->saved_data["in_features"] = size_of(x, -1);
    ctx->saved_data["of_tokens"] = x.dim() == 2;
    ctx->saved_data["x_type"] = static_cast<int64_t>(x.scalar_type());
    return call_expert_linear(x, w, ids, bias, format, scores, strategy, activations);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1], &ids = saved[2], &bias = saved[3],
                 &scores = saved[4];
    const std::string format = ctx->saved_data["format"].toStringRef();
    const Tensor grad = grads[0].to(at::kFloat);
    // Of y[t, c].
    const Tensor of_choices =
        scores.defined() ? grad.unsqueeze(1) * scores.to(at::kFloat).unsqueeze(2) : grad;
    variable_list out(8);
    if (ctx->needs_input_grad(0)) {
      const Tensor dx = call_expert_input_grad(of_choices, w, ids, format,
                                               ctx->saved_data["in_features"].toInt());
      const auto type = static_cast<at::ScalarType>(ctx->saved_data["x_type"].toInt());
      out[0] = (ctx->saved_data["of_tokens"].toBool() ? dx.sum(1) : dx).to(type);
    }
    if (ctx->saved_data["of_bias"].toBool()) {
      const Tensor chosen = ids.flatten().to(at::kLong).clamp(0, size_of(bias, 0) - 1);
      const Tensor none = at::zeros_like(bias, bias.options().dtype(at::kFloat));
      out[3] = none.index_add(0, chosen, of_choices.flatten(0, 1)).to(bias.scalar_type());
    }
    if (ctx->saved_data["of_scores"].toBool()) {
      const Tensor y = call_expert_linear(
          x.to(at::kFloat), w, ids, bias.defined() ? OptionalTensor(bias) : std::nullopt, format,
          std::nullopt, std::nullopt, ctx->saved_data["activations"].toOptional<std::string>());
      out[5] = (y * grad.unsqueeze(1)).sum(2).to(scores.scalar_type());
    }
    return out;
  }
};

struct ExpertInputGrad : torch::autograd::Function<ExpertInputGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& w,
                        const Tensor& ids, std::string format, int64_t in_features) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({w, ids});
    ctx->saved_data["format"] = format;
    return call_expert_input_grad(grad, w, ids, format, in_features);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {call_expert_linear(grads[0], saved[0], saved[1], std::nullopt,
                               ctx->saved_data["format"].toStringRef()),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

// expert_swiglu of ops that record: gate and up in f32 are kept for the backward.
Tensor recorded_swiglu(const Tensor& x, const Tensor& w, const Tensor& ids,
                       const OptionalTensor& bias, Name format, const GateOptions& o,
                       const Gate& gate, OptionalName activations) {
  const Tensor rows = x.to(at::kFloat);
  const auto product = [&](const Tensor& weight, const OptionalTensor& b) {
    return call_expert_linear(rows, weight, ids, b, format, std::nullopt, std::nullopt,
                              activations);
  };
  composed::GateUp parts;
  if (o.up_weight.has_value()) {
    OptionalTensor gate_bias, up_bias;
    if (bias.has_value()) {
      const auto halves = composed::halves_of(*bias, 1, false);
      gate_bias = halves.gate;
      up_bias = halves.up;
    }
    parts = {product(w, gate_bias), product(*o.up_weight, up_bias)};
  } else {
    parts = composed::halves_of(product(w, bias), 2, o.interleaved);
  }
  return stored(composed::gated(parts.gate, parts.up, gate), x.scalar_type());
}

}  // namespace

Tensor expert_linear(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, const OptionalTensor& scores,
                     OptionalName strategy, OptionalName activations) {
  check_frozen("weight", w);
  if (records_grad("expert_linear", x, bias, scores)) {
    check_expert_linear(x, w, ids, bias, format, scores);
    return ExpertLinear::apply(x, w, ids, bias, std::string(format), scores, owned(strategy),
                               owned(activations));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_expert_linear(x, w, ids, bias, format, scores, strategy, activations);
}

Tensor expert_input_grad(const Tensor& grad, const Tensor& w, const Tensor& ids, Name format,
                         int64_t in_features) {
  check_frozen("weight", w);
  if (records_grad("expert_input_grad", grad)) {
    return ExpertInputGrad::apply(grad, w, ids, std::string(format), in_features);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_expert_input_grad(grad, w, ids, format, in_features);
}

Tensor expert_swiglu(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, Name activation, bool interleaved,
                     const OptionalTensor& up_weight, std::optional<double> limit, double alpha,
                     OptionalName strategy, OptionalName activations) {
  check_frozen("weight", w);
  if (up_weight.has_value()) check_frozen("up_weight", *up_weight);
  const GateOptions options{activation, interleaved, up_weight, limit, alpha};
  if (records_grad("expert_swiglu", x, bias)) {
    const Gate gate = check_expert_swiglu(x, w, ids, bias, format, options).gate;
    check_expert_strategy(strategy, x, check_activations(activations, x), Op::kExpertUp);
    return recorded_swiglu(x, w, ids, bias, format, options, gate, activations);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_expert_swiglu(x, w, ids, bias, format, options, strategy, activations);
}

}  // namespace metalmm::gradients
