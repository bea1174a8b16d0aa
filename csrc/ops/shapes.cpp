#include "shapes.h"

#include "attention/checks.h"
#include "checks.h"
#include "experts/checks.h"
#include "recurrent.h"
#include "strategies.h"

namespace metalmm::shapes {
namespace {

// The sizes of x, the last one replaced by n.
Shape with_last(const Tensor& x, c10::SymInt n) {
  Shape out = x.sym_sizes().vec();
  out.back() = std::move(n);
  return out;
}

// Of an op whose result is as x.
template <class Args>
Shape as_x(const Args& a) {
  check(a);
  return a.x.sym_sizes().vec();
}

// Of gemv and gemm.
template <class Args>
Shape scaled(const Args& a) {
  const WeightShape w = check(a);
  check_strategy(a.strategy, a.x);
  return with_last(a.x, w.n);
}

}  // namespace

Shape linear(const args::linear& a) {
  const WeightShape w = check(a);
  check_strategy(a.strategy, a.x, check_activations(a.activations, a.x));
  return with_last(a.x, w.n);
}

Shape norm_linear(const args::norm_linear& a) {
  const WeightShape w = check(a);
  check_activations(a.activations, a.x);
  return with_last(a.x, w.n);
}

Shape rms_norm(const args::rms_norm& a) { return as_x(a); }

std::tuple<Shape, Shape> add_rms_norm(const args::add_rms_norm& a) {
  const Shape out = as_x(a);
  return {out, out};
}

Shape hadamard(const args::hadamard& a) { return as_x(a); }

std::tuple<Shape, Shape, Shape> rope(const args::rope& a) {
  const RopeShape r = check(a);
  const Shape kv{r.batch, a.kv_heads, r.positions, r.dim};
  return {{r.batch, a.heads, r.positions, r.dim}, kv, kv};
}

std::tuple<Shape, Shape> rope_tables(const args::rope_tables& a) {
  check_dtype(a.dtype);
  const Shape out = check(a);
  return {out, out};
}

void cache_append(const args::cache_append& a) { check(a); }

Shape rope_append(const args::rope_append& a) {
  const RopeShape r = check(a).rope;
  return {r.batch, a.heads, r.positions, r.dim};
}

Shape attention(const args::attention& a) {
  const AttentionShape s = check(a);
  return {s.cache.batch, s.queries, s.heads, s.cache.dim};
}

Shape causal_conv(const args::causal_conv& a) { return as_x(a); }

Shape gated_delta(const args::gated_delta& a) {
  const DeltaShape s = check(a);
  return {s.batch, s.positions, s.heads, s.dv};
}

Shape ssm_scan(const args::ssm_scan& a) {
  const SsmShape s = check(a);
  return {s.batch, s.positions, s.heads * s.values};
}

Shape linear_input_grad(const args::linear_input_grad& a) { return with_last(a.grad, check(a).k); }

Shape swiglu(const args::swiglu& a) {
  const GateUpShape shape = check(a);
  check_activations(a.activations, a.x);
  return with_last(a.x, shape.gate.n);
}

Shape swiglu_linear(const args::swiglu_linear& a) {
  const DownShape shape = check(a);
  check_activations(a.activations, a.gate);
  return with_last(a.gate, shape.weight.n);
}

Shape expert_linear(const args::expert_linear& a) {
  const ExpertShape e = check(a);
  check_expert_strategy(a.strategy, a.x, check_activations(a.activations, a.x),
                        a.scores.has_value() ? Op::kExpertDown : Op::kExpertLinear);
  if (a.scores.has_value()) return {e.tokens, e.weight.n};
  return {e.tokens, e.choices, e.weight.n};
}

Shape expert_input_grad(const args::expert_input_grad& a) {
  check(a);
  return with_last(a.grad, a.in_features);
}

Shape expert_swiglu(const args::expert_swiglu& a) {
  const ExpertShape e = check(a).experts;
  check_expert_strategy(a.strategy, a.x, check_activations(a.activations, a.x), Op::kExpertUp);
  return {e.tokens, e.choices, e.weight.n};
}

std::tuple<Shape, Shape> route(const args::route& a) {
  const RouteShape shape = check(a);
  const Shape out{shape.tokens, shape.choices};
  return {out, out};
}

Shape gemv(const args::gemv& a) { return scaled(a); }
Shape gemm(const args::gemm& a) { return scaled(a); }

Shape dequantize(const args::dequantize& a) {
  check_dtype(a.dtype);
  const WeightShape w = check(a);
  return {w.n, w.k};
}

Shape quantize(const args::quantize& a) {
  const Format& f = check(a);
  return with_last(a.w, f.row_bytes(a.w.sym_size(1)));
}

Shape embedding(const args::embedding& a) {
  check_dtype(a.dtype);
  Shape out = a.ids.sym_sizes().vec();
  out.push_back(check(a).k);
  return out;
}

Shape probe(const args::probe& a) { return check(a) == Op::kDot ? Shape{} : a.x.sym_sizes().vec(); }

}  // namespace metalmm::shapes
