#include "ops.h"

#include <vector>

#include "operands.h"
#include "ops/strategies.h"

namespace metalmm::gpu {
namespace {

// Rows [first, last) of W.
at::Tensor decode(const Engine& e, const PackedWeight& w, int64_t first, int64_t last,
                  at::ScalarType type) {
  Operands o;
  o[kSlotWeight] = aligned_rows({w.format, w.rows.narrow(0, first, last - first), w.k});
  o[kSlotY] = at::empty({last - first, w.k}, w.rows.options().dtype(type));
  Problem p;
  p.op = Op::kDequantize;
  p.n = last - first;
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(type);
  run(e, p, o);
  return o[kSlotY];
}

struct Addends {
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  bool bias_multiplies = false;
};

// y of the rows of x; of their norm, where there is one, of K > 0 values.
at::Tensor linear_of_rows(const Engine& e, const at::Tensor& x, at::Tensor rows,
                          const PackedWeight& w, const Addends& addends, const Norm* norm,
                          std::optional<StrategyId> strategy) {
  const at::ScalarType dtype = rows.scalar_type();
  Problem p = problem(Op::kLinear, rows, w);
  Operands o;
  o[kSlotX] = rows;
  if (norm) normalise(e, p, o, *norm);
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotBias] = addend(addends.bias, dtype);
  p.bias_multiplies = addends.bias_multiplies;
  o[kSlotC] = residual_rows(addends.residual, dtype, p);
  o[kSlotY] = at::empty({rows.size(0), w.rows.size(0)}, rows.options());
  run(e, p, o, strategy);
  return like_input(o[kSlotY], x);
}

// x Wᵀ of gemv and gemm, scaled.
template <class Args>
at::Tensor scaled_matmul(const Engine& e, const Args& a, double softcap = 0) {
  const PackedWeight w = packed(a.weight, check(a));
  const at::ScalarType dtype = a.beta == 0 ? a.x.scalar_type() : common_dtype(a.x, {a.c});
  Operands o;
  o[kSlotX] = as_rows(a.x, dtype);
  o[kSlotWeight] = aligned_rows(w);
  if (a.beta != 0) o[kSlotC] = addend(a.c, dtype);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  Problem p = problem(Op::kLinear, o[kSlotX], w);
  p.alpha = static_cast<float>(a.alpha);
  p.beta = static_cast<float>(a.beta);
  p.softcap = static_cast<float>(softcap);
  run(e, p, o, find_strategy(a.strategy, a.x));
  return like_input(o[kSlotY], a.x);
}

}  // namespace

at::Tensor linear(const Engine& e, const args::linear& a) {
  const PackedWeight w = packed(a.weight, check(a));
  check_activations(a.activations, a.x);
  const Addends addends{a.bias, a.residual};
  return linear_of_rows(e, a.x, as_rows(a.x, common_dtype(a.x, {a.bias, a.residual})), w, addends,
                        nullptr, find_strategy(a.strategy, a.x));
}

at::Tensor norm_linear(const Engine& e, const args::norm_linear& a) {
  const PackedWeight w = packed(a.weight, check(a));
  check_activations(a.activations, a.x);
  const Norm norm{a.norm_weight, a.eps, a.offset};
  const bool has_factors = a.factors.has_value();
  const Addends addends{has_factors ? a.factors : a.bias, a.residual, has_factors};
  const at::ScalarType dtype = common_dtype(a.x, {a.norm_weight, addends.bias, a.residual});
  return linear_of_rows(e, a.x, as_rows(a.x, dtype), w, addends, w.k ? &norm : nullptr,
                        std::nullopt);
}

at::Tensor linear_input_grad(const Engine& e, const args::linear_input_grad& a) {
  const PackedWeight w = packed(a.weight, check(a));
  const at::Tensor out = times_decoded(
      as_rows(a.grad, at::kFloat), w.k,
      [&](int64_t first, int64_t last) { return decode(e, w, first, last, at::kFloat); });
  return like_input(out, a.grad);
}

at::Tensor gemv(const Engine& e, const args::gemv& a) { return scaled_matmul(e, a); }
at::Tensor gemm(const Engine& e, const args::gemm& a) { return scaled_matmul(e, a, a.softcap); }

at::Tensor dequantize(const Engine& e, const args::dequantize& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  const PackedWeight w = packed(a.weight, check(a));
  return decode(e, w, 0, w.rows.size(0), type);
}

// Ids on a device are not checked, which would wait for it: one below 0 gives the first row of the
// table, one beyond it the last.
at::Tensor embedding(const Engine& e, const args::embedding& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  const PackedWeight w = packed(a.weight, check(a));
  check_ids(a.ids, w.rows.size(0));
  Operands o;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotIds] = a.ids.to(at::kLong).contiguous();
  o[kSlotY] = at::empty({o[kSlotIds].numel(), w.k}, w.rows.options().dtype(type));
  Problem p;
  p.op = Op::kEmbedding;
  p.m = o[kSlotIds].numel();
  p.n = w.rows.size(0);
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(type);
  if (a.scale.has_value()) {
    p.has_scale = true;
    p.float_scale = a.scale->scalar_type() != type;
    p.row_scales = a.scale->numel() > 1;
    o[kSlotNorm] = addend(a.scale, p.float_scale ? at::kFloat : type);
  }
  run(e, p, o);
  std::vector<int64_t> shape = a.ids.sizes().vec();
  shape.push_back(w.k);
  return o[kSlotY].view(shape);
}

// No shader quantizes: w is copied to the CPU, quantized there, the result copied back.
at::Tensor quantize(const args::quantize& a) {
  check(a);
  OptionalTensor importance;
  if (a.importance) importance = a.importance->detach().to(at::kCPU);
  return call(args::quantize{a.w.detach().to(at::kCPU), a.format, importance}).to(a.w.device());
}

at::Tensor probe(const Engine& e, const args::probe& a) {
  Problem p;
  p.op = check(a);
  p.dtype = dtype_of(a.x.scalar_type());
  const bool is_dot = p.op == Op::kDot;
  (is_dot ? p.k : p.n) = a.x.numel();
  Operands o;
  o[kSlotX] = a.x.contiguous();
  o[kSlotX2] = a.x2.contiguous();
  o[kSlotY] = is_dot ? at::empty({}, a.x.options()) : at::empty(a.x.sizes(), a.x.options());
  run(e, p, o);
  return o[kSlotY];
}

}  // namespace metalmm::gpu
