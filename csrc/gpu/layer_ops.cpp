// The ops of a decoder layer beside linear and norm_linear.
#include <tuple>

#include "operands.h"
#include "ops/exact_rows.h"
#include "ops/strategies.h"

namespace metalmm::gpu {
namespace {

// act(gate) * up of gate and up in f32, or rounded to dtype as torch's matmul does; rounded once.
at::Tensor act_mul(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                   Activation activation, at::ScalarType dtype) {
  Operands o;
  o[kSlotX] = gate;
  o[kSlotX2] = up;
  o[kSlotY] = at::empty(gate.sizes(), gate.options().dtype(dtype));
  Problem p;
  p.op = Op::kActMul;
  p.n = gate.numel();
  p.activation = activation;
  p.dtype = dtype_of(dtype);
  p.rounded = gate.scalar_type() != at::kFloat;
  run(e, p, o);
  return o[kSlotY];
}

}  // namespace

at::Tensor swiglu(const Engine& e, const args::swiglu& a) {
  const at::Tensor& x = a.x;
  const GateUpShape shape = check(a);
  check_activations(a.activations, x);
  const PackedWeight gate_w = packed(a.gate_weight, shape.gate);
  const PackedWeight up_w = packed(a.up_weight, shape.up);
  const bool has_norm = a.eps.has_value() && gate_w.k;
  const Norm norm{a.norm_weight, a.eps.value_or(0), a.offset};
  const at::ScalarType dtype = common_dtype(x, {has_norm ? a.norm_weight : std::nullopt});
  Operands o;
  o[kSlotX] = as_rows(x, dtype);
  const int64_t m = o[kSlotX].size(0);
  const bool is_alike = &gate_w.format == &up_w.format;
  if (!is_alike || are_exact(m) || !is_fused(Op::kSwigluUp, m)) {
    // Exact rows have the bits of swiglu_up: its sums are those of gemv, its norm is fused where
    // that of a row alone is. It would read W for each row.
    const bool is_exact = is_alike && are_exact(m);
    const bool norms = is_exact && has_norm &&
                       norm_is_fused(problem(Op::kSwigluUp, o[kSlotX], gate_w), e.gpu(x.device()));
    const at::Tensor rows = has_norm && !norms ? normalised(e, o[kSlotX], norm) : o[kSlotX];
    // Where torch's matmul rounds both, f32 would be a copy more of each.
    const bool rounds = !is_exact && a.gate_scale == 1 && rounds_product(e, rows, gate_w) &&
                        rounds_product(e, rows, up_w);
    std::optional<StrategyId> strategy;
    if (is_exact) strategy = StrategyId::gemv_batched;
    const auto of = [&](const PackedWeight& w) {
      return product(e, rows, w, rounds ? dtype : at::kFloat, norms ? &norm : nullptr, strategy);
    };
    at::Tensor gate = of(gate_w), up = of(up_w);
    if (a.gate_scale != 1) gate = gate * a.gate_scale;
    return like_input(act_mul(e, gate, up, shape.activation, x.scalar_type()), x);
  }
  Problem p = problem(Op::kSwigluUp, o[kSlotX], gate_w);
  p.activation = shape.activation;
  p.alpha = static_cast<float>(a.gate_scale);
  if (has_norm) normalise(e, p, o, norm);
  o[kSlotWeight] = aligned_rows(gate_w);
  o[kSlotWeight2] = aligned_rows(up_w);
  o[kSlotY] = at::empty({o[kSlotX].size(0), o[kSlotWeight].size(0)}, o[kSlotX].options());
  run(e, p, o);
  return like_input(o[kSlotY], x);
}

at::Tensor swiglu_linear(const Engine& e, const args::swiglu_linear& a) {
  const at::Tensor &gate = a.gate, &up = a.up;
  const DownShape shape = check(a);
  check_activations(a.activations, gate);
  const PackedWeight w = packed(a.weight, shape.weight);
  const at::ScalarType dtype = common_dtype(gate, {up, a.bias, a.residual});
  Operands o;
  o[kSlotX] = as_rows(gate, dtype);
  o[kSlotX2] = as_rows(up, dtype);
  const int64_t m = o[kSlotX].size(0);
  if (!is_fused(Op::kSwigluDown, are_exact(m) ? 1 : m)) {
    // The product stays f32: f16 cannot hold 3e4 * 3e4. So x of the linear is f32, and so are its
    // tiles; swiglu, then linear, is the faster way for many rows.
    const auto f32 = [](const at::Tensor& t) { return t.to(at::kFloat).contiguous(); };
    const at::Tensor hidden =
        act_mul(e, f32(o[kSlotX]), f32(o[kSlotX2]), shape.activation, at::kFloat);
    return linear(e, args::linear{hidden.view(gate.sizes()), a.weight, a.bias, a.format,
                                  std::nullopt, a.residual})
        .to(gate.scalar_type());
  }
  if (row_stride(o[kSlotX]) != row_stride(o[kSlotX2])) {  // one stride for both
    o[kSlotX] = o[kSlotX].contiguous();
    o[kSlotX2] = o[kSlotX2].contiguous();
  }
  Problem p = problem(Op::kSwigluDown, o[kSlotX], w);
  p.activation = shape.activation;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotBias] = addend(a.bias, dtype);
  o[kSlotC] = residual_rows(a.residual, dtype, p);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  run(e, p, o);
  return like_input(o[kSlotY], gate);
}

at::Tensor rms_norm(const Engine& e, const args::rms_norm& a) {
  check(a);
  const at::Tensor rows = as_rows(a.x, common_dtype(a.x, {a.weight, a.residual, a.gate}));
  return like_input(normalised(e, rows, {a.weight, a.eps, a.offset}, a.residual, a.gate), a.x);
}

at::Tensor hadamard(const Engine& e, const args::hadamard& a) {
  check(a);
  Operands o;
  o[kSlotX] = a.x.contiguous();
  o[kSlotY] = at::empty(a.x.sizes(), a.x.options());
  Problem p;
  p.op = Op::kHadamard;
  p.n = a.x.numel();
  p.dtype = dtype_of(a.x.scalar_type());
  run(e, p, o);
  return o[kSlotY];
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const Engine& e, const args::add_rms_norm& a) {
  const at::Tensor& x = a.x;
  check(a);
  if (common_dtype(x, {a.residual, a.weight}) != x.scalar_type()) {  // the sum has x's dtype
    const at::Tensor sum = stored(x.to(at::kFloat) + a.residual, x.scalar_type());
    return {rms_norm(e, args::rms_norm{sum, a.weight, a.eps, a.offset}), sum};
  }
  Operands o;
  o[kSlotX] = as_rows(x, x.scalar_type());
  o[kSlotX2] = as_rows(a.residual, x.scalar_type());
  o[kSlotNorm] = addend(a.weight, x.scalar_type());
  o[kSlotY] = at::empty(o[kSlotX].sizes(), x.options());
  o[kSlotY2] = at::empty(o[kSlotX].sizes(), x.options());
  Problem p = problem(Op::kAddRmsNorm, o[kSlotX]);
  p.x2_stride = row_stride(o[kSlotX2]);
  p.eps = static_cast<float>(a.eps);
  p.offset = static_cast<float>(a.offset);
  run(e, p, o);
  return {like_input(o[kSlotY], x), like_input(o[kSlotY2], x)};
}

}  // namespace metalmm::gpu
