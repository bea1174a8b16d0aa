#include "experts.h"

#include "operands.h"
#include "ops/experts/composed.h"
#include "ops/strategies.h"

namespace metalmm::gpu {
namespace {

// f(expert, choices) for each expert that ids name, choices int64 on the device of ids: t C + c of
// those that do. Waits for the device.
template <class F>
void each_expert(const at::Tensor& ids, int64_t experts, const F& f) {
  const at::Tensor flat = ids.flatten().to(at::kLong).clamp(0, experts - 1);
  const auto [sorted, order] = flat.sort(/*stable=*/true, 0, false);
  const at::Tensor counts = at::bincount(sorted.to(at::kCPU), {}, experts);
  const int64_t* count = elements<int64_t>(counts);
  for (int64_t expert = 0, first = 0; expert < experts; first += count[expert++]) {
    if (count[expert]) f(expert, order.narrow(0, first, count[expert]));
  }
}

// x Wᵀ of every choice, f32 [T, C, N].
at::Tensor products(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                    const at::Tensor& ids, std::string_view format) {
  const int64_t choices = ids.size(1);
  const at::Tensor rows = as_rows(x, at::kFloat);
  at::Tensor out = at::empty({ids.numel(), weight.size(1)}, rows.options());
  each_expert(ids, weight.size(0), [&](int64_t expert, const at::Tensor& chosen) {
    const at::Tensor row_of = x.dim() == 2 ? chosen.div(choices, "floor") : chosen;
    out.index_copy_(0, chosen,
                    linear(e, rows.index_select(0, row_of), weight.select(0, expert), std::nullopt,
                           format, std::nullopt, std::nullopt, std::nullopt));
  });
  return out.view({ids.size(0), choices, out.size(1)});
}

at::Tensor with_bias(const at::Tensor& y, const OptionalTensor& bias, const at::Tensor& ids) {
  if (!bias.has_value()) return y;
  const at::Tensor chosen = ids.flatten().to(at::kLong).clamp(0, bias->size(0) - 1);
  return y + bias->to(at::kFloat).index_select(0, chosen).view(y.sizes());
}

}  // namespace

at::Tensor expert_linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& ids, const OptionalTensor& bias, std::string_view format,
                         const OptionalTensor& scores, OptionalName strategy,
                         OptionalName activations) {
  check_expert_linear(x, weight, ids, bias, format, scores);
  check_activations(activations, x);
  check_strategy(strategy, x);
  check_ids(ids, weight.size(0), "weight", "experts");
  at::Tensor y = with_bias(products(e, x, weight, ids, format), bias, ids);
  if (scores.has_value()) y = (y * scores->to(at::kFloat).unsqueeze(2)).sum(1);
  return stored(y, x.scalar_type());
}

at::Tensor expert_swiglu(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& ids, const OptionalTensor& bias, std::string_view format,
                         std::string_view activation, bool interleaved,
                         const OptionalTensor& up_weight, std::optional<double> limit, double alpha,
                         OptionalName strategy, OptionalName activations) {
  const GatedShape shape = check_expert_swiglu(x, weight, ids, bias, format,
                                               {activation, interleaved, up_weight, limit, alpha});
  check_activations(activations, x);
  check_strategy(strategy, x);
  check_ids(ids, weight.size(0), "weight", "experts");
  at::Tensor both = products(e, x, weight, ids, format);
  if (up_weight.has_value()) both = at::cat({both, products(e, x, *up_weight, ids, format)}, 2);
  both = with_bias(both, bias, ids);
  const auto [gate, up] = composed::halves_of(both, 2, interleaved);
  return stored(composed::gated(gate, up, shape.gate), x.scalar_type());
}

at::Tensor expert_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             const at::Tensor& ids, std::string_view format, int64_t in_features) {
  check_expert_input_grad(grad, weight, ids, format, in_features);
  check_ids(ids, weight.size(0), "weight", "experts");
  const at::Tensor rows = as_rows(grad, at::kFloat);
  at::Tensor out = at::empty({rows.size(0), in_features}, rows.options());
  each_expert(ids, weight.size(0), [&](int64_t expert, const at::Tensor& chosen) {
    out.index_copy_(0, chosen,
                    linear_input_grad(e, rows.index_select(0, chosen), weight.select(0, expert),
                                      format, in_features));
  });
  return out.view({grad.size(0), grad.size(1), in_features}).to(grad.scalar_type());
}

}  // namespace metalmm::gpu
