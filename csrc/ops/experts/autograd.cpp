#include <string>

#include "checks.h"
#include "composed.h"
#include "metal/geometry.h"
#include "ops/gradients.h"
#include "ops/strategies.h"
#include "ops/tensors.h"

namespace metalmm::gradients {
namespace {

int64_t size_of(const Tensor& t, int64_t dim) {
  return t.sym_size(dim).guard_int(__FILE__, __LINE__);
}

struct ExpertLinear {
  static void save(AutogradContext* ctx, const args::expert_linear& a) {
    const auto kept = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
    // x is only read for the gradient of scores.
    ctx->save_for_backward(
        {needs_grad(a.scores) ? a.x : Tensor(), a.weight, a.ids, kept(a.bias), kept(a.scores)});
    // needs_input_grad() counts the tensors that are there.
    ctx->saved_data["of_bias"] = needs_grad(a.bias);
    ctx->saved_data["of_scores"] = needs_grad(a.scores);
    if (needs_grad(a.residual)) {
      ctx->saved_data["residual_type"] = static_cast<int64_t>(a.residual->scalar_type());
    }
    ctx->saved_data["format"] = std::string(a.format);
    ctx->saved_data["activations"] = owned(a.activations);
    ctx->saved_data["in_features"] = last_size(a.x);
    ctx->saved_data["of_tokens"] = a.x.dim() == 2;
    ctx->saved_data["x_type"] = static_cast<int64_t>(a.x.scalar_type());
  }

  static void backward(AutogradContext* ctx, const Tensor& given, variable_list& out) {
    using At = expert_linear_at;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1], &ids = saved[2], &bias = saved[3],
                 &scores = saved[4];
    const std::string format = ctx->saved_data["format"].toStringRef();
    const Tensor grad = given.to(at::kFloat);
    if (ctx->saved_data.count("residual_type")) {
      const int64_t type = ctx->saved_data["residual_type"].toInt();
      out[At::residual] = grad.to(static_cast<at::ScalarType>(type));
    }
    // The gradient of y[t, c].
    const Tensor of_choices =
        scores.defined() ? grad.unsqueeze(1) * scores.to(at::kFloat).unsqueeze(2) : grad;
    if (ctx->needs_input_grad(At::x)) {
      const Tensor dx = call(args::expert_input_grad{of_choices, w, ids, format,
                                                     ctx->saved_data["in_features"].toInt()});
      const auto type = static_cast<at::ScalarType>(ctx->saved_data["x_type"].toInt());
      out[At::x] = (ctx->saved_data["of_tokens"].toBool() ? dx.sum(1) : dx).to(type);
    }
    if (ctx->saved_data["of_bias"].toBool()) {
      const Tensor chosen = ids.flatten().to(at::kLong).clamp(0, size_of(bias, 0) - 1);
      const Tensor none = at::zeros_like(bias, bias.options().dtype(at::kFloat));
      out[At::bias] = none.index_add(0, chosen, of_choices.flatten(0, 1)).to(bias.scalar_type());
    }
    if (ctx->saved_data["of_scores"].toBool()) {
      const Tensor y = call(args::expert_linear{
          x.to(at::kFloat), w, ids, bias.defined() ? OptionalTensor(bias) : std::nullopt, format,
          std::nullopt, std::nullopt, ctx->saved_data["activations"].toOptional<std::string>()});
      out[At::scores] = (y * grad.unsqueeze(1)).sum(2).to(scores.scalar_type());
    }
  }
};

struct ExpertInputGrad {
  static void save(AutogradContext* ctx, const args::expert_input_grad& a) {
    ctx->save_for_backward({a.weight, a.ids});
    ctx->saved_data["format"] = std::string(a.format);
  }
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    const variable_list saved = ctx->get_saved_variables();
    out[expert_input_grad_at::grad] = call(args::expert_linear{
        grad, saved[0], saved[1], std::nullopt, ctx->saved_data["format"].toStringRef()});
  }
};

}  // namespace

Tensor recorded(const args::expert_linear& a) { return record<ExpertLinear>(a); }
Tensor recorded(const args::expert_input_grad& a) { return record<ExpertInputGrad>(a); }

// The ids are the op's own; the weights are computed again, of the scores at them.
std::tuple<Tensor, Tensor> recorded(const args::route& a) {
  const RouteShape shape = check(a);
  Tensor ids;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    ids = std::get<1>(call(a));
  }
  Tensor logits = a.x.to(at::kFloat);
  if (a.weight.has_value()) {
    logits = call(args::linear{logits, *a.weight, std::nullopt, a.format});
  }
  if (a.bias.has_value()) logits = logits + a.bias->to(at::kFloat);
  const Tensor scores = shape.is_sigmoid ? logits.sigmoid() : logits.softmax(-1);
  Tensor weights = scores.gather(1, ids.narrow(1, 0, a.top_k));
  if (a.renormalise) weights = weights / (weights.sum(-1, true) + kRouteLeast);
  weights = weights * a.scale;
  OptionalTensor shared = a.shared;
  if (a.shared_weight.has_value()) {
    shared = call(args::linear{a.x.to(at::kFloat), *a.shared_weight, {}, a.shared_format});
  }
  if (shared.has_value()) weights = at::cat({weights, shared->to(at::kFloat).sigmoid()}, 1);
  return {stored(weights, at::kFloat), ids};
}

// The op where autograd records: gate and up in f32 are kept for the backward.
Tensor recorded(const args::expert_swiglu& a) {
  const Gate gate = check(a).gate;
  check_expert_strategy(a.strategy, a.x, check_activations(a.activations, a.x), Op::kExpertUp);
  const Tensor rows = a.x.to(at::kFloat);
  const auto product = [&](const Tensor& weight, const OptionalTensor& bias) {
    return call(args::expert_linear{rows, weight, a.ids, bias, a.format, std::nullopt, std::nullopt,
                                    a.activations});
  };
  composed::GateUp parts;
  if (a.up_weight.has_value()) {
    OptionalTensor gate_bias, up_bias;
    if (a.bias.has_value()) {
      const auto halves = composed::halves_of(*a.bias, 1, false);
      gate_bias = halves.gate;
      up_bias = halves.up;
    }
    parts = {product(a.weight, gate_bias), product(*a.up_weight, up_bias)};
  } else {
    parts = composed::halves_of(product(a.weight, a.bias), 2, a.interleaved);
  }
  return stored(composed::gated(parts.gate, parts.up, gate), a.x.scalar_type());
}

}  // namespace metalmm::gradients
