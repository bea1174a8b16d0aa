#include "checks.h"

#include <cmath>

namespace metalmm {
namespace {

constexpr const char kOai[] = "swiglu_oai";

Gate check_gate(const GateOptions& o) {
  constexpr int kPlain = sizeof kActivations / sizeof *kActivations;
  const int index = or_value_error([&] {
    return find_name("activation", o.activation, kPlain + 1,
                     [&](int i) { return i < kPlain ? kActivations[i] : kOai; });
  });
  const Gate out{index < kPlain ? static_cast<Activation>(index) : Activation::kSilu,
                 index == kPlain, o.limit, o.alpha};
  check_f32("alpha", o.alpha);
  TORCH_CHECK_VALUE(out.is_oai || o.alpha == 1, "alpha: ", o.alpha, "; only of activation ", kOai,
                    ", of ", o.activation, " it is 1");
  if (o.limit.has_value()) {
    check_f32("limit", *o.limit);
    TORCH_CHECK_VALUE(static_cast<float>(*o.limit) > 0, "limit: ", *o.limit,
                      " as f32; must be more than 0");
  }
  return out;
}

// `x` [T, K] or [T, C, K] of ids [T, C], whose weight is `w` of a format.
ExpertShape check_choices(const char* name, const at::Tensor& x, const at::Tensor& ids,
                          WeightShape weight, c10::SymInt experts) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                    ids.scalar_type(), "; allowed: int64, int32");
  check_device("ids", ids, x);
  TORCH_CHECK_VALUE(ids.dim() == 2, "ids: shape ", ids.sym_sizes(), "; must be [T, C]");
  const ExpertShape out{std::move(weight), std::move(experts), ids.sym_size(0), ids.sym_size(1)};
  TORCH_CHECK_VALUE(x.sym_size(0) == out.tokens && (x.dim() == 2 || x.sym_size(1) == out.choices),
                    name, ": shape ", x.sym_sizes(), "; ids are ", ids.sym_sizes());
  TORCH_CHECK_INDEX(out.experts > 0 || ids.sym_numel() == 0, "ids: ", ids.sym_numel(),
                    " of them; weight has 0 experts");
  return out;
}

void check_dims(const char* name, const at::Tensor& x, bool takes_tokens) {
  TORCH_CHECK_VALUE(x.dim() == 3 || (takes_tokens && x.dim() == 2), name, ": shape ", x.sym_sizes(),
                    "; must be ", takes_tokens ? "[T, K] or [T, C, K]" : "[T, C, N]");
}

}  // namespace

ExpertShape check_expert_linear(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& ids, const OptionalTensor& bias,
                                std::string_view format, const OptionalTensor& scores) {
  const c10::SymInt k = check_rows("x", x);
  check_dims("x", x, true);
  ExpertShape out = check_choices("x", x, ids, check_weight("weight", weight, format, k, x, true),
                                  weight.sym_size(0));
  check_addend("bias", bias, {out.experts, out.weight.n}, x);
  check_addend("scores", scores, {out.tokens, out.choices}, x);
  return out;
}

GatedShape check_expert_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                               const OptionalTensor& bias, std::string_view format,
                               const GateOptions& o) {
  GatedShape out{check_expert_linear(x, weight, ids, std::nullopt, format, std::nullopt),
                 check_gate(o)};
  ExpertShape& e = out.experts;
  if (o.up_weight.has_value()) {
    TORCH_CHECK_VALUE(!o.interleaved,
                      "interleaved: True; rows of gate and up alternate in one "
                      "weight, but up_weight is given");
    check_weight("up_weight", *o.up_weight, format, e.weight.k, x, true);
    TORCH_CHECK_VALUE(o.up_weight->sym_sizes().slice(0, 2) == weight.sym_sizes().slice(0, 2),
                      "up_weight: shape ", o.up_weight->sym_sizes(), "; weight is ",
                      weight.sym_sizes());
  } else {
    TORCH_CHECK_VALUE(e.weight.n % 2 == 0, "weight: ", e.weight.n,
                      " rows an expert; as many of gate as of up must be even");
    e.weight.n = e.weight.n / 2;
  }
  check_addend("bias", bias, {e.experts, e.weight.n * 2}, x);
  return out;
}

ExpertShape check_expert_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                                    const at::Tensor& ids, std::string_view format,
                                    const c10::SymInt& in_features) {
  const c10::SymInt n = check_rows("grad", grad);
  check_dims("grad", grad, false);
  ExpertShape out = check_choices("grad", grad, ids,
                                  check_weight("weight", weight, format, in_features, grad, true),
                                  weight.sym_size(0));
  TORCH_CHECK_VALUE(n == out.weight.n, "grad: last size ", n, "; weight has ", out.weight.n,
                    " rows an expert");
  return out;
}

}  // namespace metalmm
