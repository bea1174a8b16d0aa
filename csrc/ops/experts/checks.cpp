#include "checks.h"

#include "metal/geometry.h"

namespace metalmm {
namespace {

constexpr int kMostRouted = RouteGeometry::kMost;
constexpr const char kOai[] = "swiglu_oai";

Gate check_gate(const args::expert_swiglu& o) {
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

// Rows of x by expert, of an op with such arguments.
template <class Args>
ExpertShape check_product(const Args& a) {
  const c10::SymInt k = check_rows("x", a.x);
  check_dims("x", a.x, true);
  return check_choices("x", a.x, a.ids, check_weight("weight", a.weight, a.format, k, a.x, true),
                       a.weight.sym_size(0));
}

}  // namespace

ExpertShape check(const args::expert_linear& a) {
  const ExpertShape out = check_product(a);
  check_addend("bias", a.bias, {out.experts, out.weight.n}, a.x);
  check_addend("scores", a.scores, {out.tokens, out.choices}, a.x);
  TORCH_CHECK_VALUE(a.scores.has_value() || !a.residual.has_value(),
                    "residual: given, but no scores; it is added to their sum");
  check_addend("residual", a.residual, {out.tokens, out.weight.n}, a.x);
  return out;
}

GatedShape check(const args::expert_swiglu& a) {
  GatedShape out{check_product(a), check_gate(a)};
  ExpertShape& e = out.experts;
  if (a.up_weight.has_value()) {
    TORCH_CHECK_VALUE(!a.interleaved,
                      "interleaved: True; rows of gate and up alternate in one "
                      "weight, but up_weight is given");
    check_weight("up_weight", *a.up_weight, a.format, e.weight.k, a.x, true);
    TORCH_CHECK_VALUE(a.up_weight->sym_sizes().slice(0, 2) == a.weight.sym_sizes().slice(0, 2),
                      "up_weight: shape ", a.up_weight->sym_sizes(), "; weight is ",
                      a.weight.sym_sizes());
  } else {
    TORCH_CHECK_VALUE(e.weight.n % 2 == 0, "weight: ", e.weight.n,
                      " rows an expert; as many of gate as of up must be even");
    e.weight.n = e.weight.n / 2;
  }
  check_addend("bias", a.bias, {e.experts, e.weight.n * 2}, a.x);
  return out;
}

RouteShape check(const args::route& a) {
  const c10::SymInt last = check_rows("x", a.x);
  TORCH_CHECK_VALUE(a.x.dim() == 2, "x: shape ", a.x.sym_sizes(), "; must be [T, ",
                    a.weight.has_value() ? "K]" : "E]");
  const bool has_shared = a.shared.has_value() || a.shared_weight.has_value();
  RouteShape out{a.x.sym_size(0), last, {}, {}, false, a.top_k + has_shared};
  if (a.weight.has_value()) {
    out.weight.emplace(check_weight("weight", *a.weight, a.format, last, a.x));
    out.experts = out.weight->n;
  }
  constexpr const char* kScorings[] = {"softmax", "sigmoid"};
  out.is_sigmoid = check_word("scoring", a.scoring, kScorings);
  check_addend("bias", a.bias, {out.experts}, a.x);
  check_addend("choice_bias", a.choice_bias, {out.experts}, a.x);
  check_addend("shared", a.shared, {out.tokens, 1}, a.x);
  if (a.shared_weight.has_value()) {
    TORCH_CHECK_VALUE(a.weight.has_value() && !a.shared.has_value(), "shared_weight: given, ",
                      a.shared.has_value() ? "and shared, the logits that it makes, too"
                                           : "but no weight; x are logits then");
    out.shared_weight.emplace(
        check_weight("shared_weight", *a.shared_weight, a.shared_format, last, a.x));
    TORCH_CHECK_VALUE(out.shared_weight->n == 1, "shared_weight: ", out.shared_weight->n,
                      " rows; must be 1");
  }
  check_f32("scale", a.scale);
  const c10::SymInt& e = out.experts;
  TORCH_CHECK_VALUE(a.groups >= 1 && a.groups <= kMostRouted && e % a.groups == 0,
                    "groups: ", a.groups, "; must be 1 to ", kMostRouted, " and divide the ", e,
                    " experts");
  TORCH_CHECK_VALUE(a.kept_groups >= 1 && a.kept_groups <= a.groups, "kept_groups: ", a.kept_groups,
                    "; must be 1 to the ", a.groups, " groups");
  TORCH_CHECK_VALUE(a.groups == 1 || a.group_best == 1 || (a.group_best == 2 && e / a.groups >= 2),
                    "group_best: ", a.group_best, "; must be 1, or 2 of groups of ", e / a.groups,
                    " experts where they have 2");
  const c10::SymInt from = e / a.groups * a.kept_groups;
  const int64_t most = kMostRouted - has_shared;
  TORCH_CHECK_VALUE(a.top_k >= 1 && a.top_k <= most && from >= a.top_k, "top_k: ", a.top_k,
                    "; must be 1 to ", most, ", of ", from, " experts");
  return out;
}

OptionalTensor with_shared_row(const args::route& a) {
  if (!a.shared_weight.has_value() || a.format != a.shared_format) return std::nullopt;
  const at::Tensor &w = *a.weight, &row = *a.shared_weight;
  const bool is_behind = w.scalar_type() == row.scalar_type() && w.is_contiguous() &&
                         row.is_contiguous() && w.storage().is_alias_of(row.storage()) &&
                         row.storage_offset() == w.storage_offset() + w.numel();
  if (!is_behind) return std::nullopt;
  return w.as_strided({w.size(0) + 1, w.size(1)}, {w.size(1), 1});
}

ExpertShape check(const args::expert_input_grad& a) {
  const c10::SymInt n = check_rows("grad", a.grad);
  check_dims("grad", a.grad, false);
  ExpertShape out =
      check_choices("grad", a.grad, a.ids,
                    check_weight("weight", a.weight, a.format, a.in_features, a.grad, true),
                    a.weight.sym_size(0));
  TORCH_CHECK_VALUE(n == out.weight.n, "grad: last size ", n, "; weight has ", out.weight.n,
                    " rows an expert");
  return out;
}

}  // namespace metalmm
