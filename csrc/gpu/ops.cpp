#include "ops.h"

#include <vector>

#include "operands.h"
#include "ops/op_calls.h"
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
  o[kSlotC] = residual_rows(addends.residual, dtype, p);
  o[kSlotY] = at::empty({rows.size(0), w.rows.size(0)}, rows.options());
  run(e, p, o, strategy);
  return like_input(o[kSlotY], x);
}

at::Tensor scaled_matmul(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         std::string_view format, const OptionalTensor& c, double alpha,
                         double beta, OptionalName strategy, int64_t dim) {
  const PackedWeight w = packed(weight, check_scaled(x, weight, format, c, alpha, beta, dim));
  const at::ScalarType dtype = beta == 0 ? x.scalar_type() : common_dtype(x, {c});
  Operands o;
  o[kSlotX] = as_rows(x, dtype);
  o[kSlotWeight] = aligned_rows(w);
  if (beta != 0) o[kSlotC] = addend(c, dtype);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  Problem p = problem(Op::kLinear, o[kSlotX], w);
  p.alpha = static_cast<float>(alpha);
  p.beta = static_cast<float>(beta);
  run(e, p, o, find_strategy(strategy, x));
  return like_input(o[kSlotY], x);
}

}  // namespace

at::Tensor linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                  const OptionalTensor& bias, std::string_view format, OptionalName strategy,
                  const OptionalTensor& residual, OptionalName activations) {
  const PackedWeight w = packed(weight, check_linear(x, weight, bias, format, residual));
  check_activations(activations, x);
  const Addends addends{bias, residual};
  return linear_of_rows(e, x, as_rows(x, common_dtype(x, {bias, residual})), w, addends, nullptr,
                        find_strategy(strategy, x));
}

at::Tensor norm_linear(const Engine& e, const at::Tensor& x, const OptionalTensor& norm_weight,
                       double eps, double offset, const at::Tensor& weight,
                       const OptionalTensor& bias, std::string_view format,
                       const OptionalTensor& residual, OptionalName activations) {
  const PackedWeight w = packed(
      weight, check_norm_linear(x, norm_weight, eps, offset, weight, bias, format, residual));
  check_activations(activations, x);
  const Norm norm{norm_weight, eps, offset};
  const at::Tensor rows = as_rows(x, common_dtype(x, {norm_weight, bias, residual}));
  return linear_of_rows(e, x, rows, w, {bias, residual}, w.k ? &norm : nullptr, std::nullopt);
}

at::Tensor linear_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features) {
  const PackedWeight w = packed(weight, check_input_grad(grad, weight, format, in_features));
  const at::Tensor out = times_decoded(
      as_rows(grad, at::kFloat), w.k,
      [&](int64_t first, int64_t last) { return decode(e, w, first, last, at::kFloat); });
  return like_input(out, grad);
}

at::Tensor gemv(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy) {
  return scaled_matmul(e, x, weight, format, c, alpha, beta, strategy, 1);
}

at::Tensor gemm(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy) {
  return scaled_matmul(e, x, weight, format, c, alpha, beta, strategy, 2);
}

at::Tensor dequantize(const Engine& e, const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_dequantize(weight, format, in_features));
  return decode(e, w, 0, w.rows.size(0), type);
}

at::Tensor embedding(const Engine& e, const at::Tensor& ids, const at::Tensor& weight,
                     std::string_view format, std::optional<int64_t> in_features,
                     std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_embedding(ids, weight, format, in_features));
  check_ids(ids, w.rows.size(0));
  Operands o;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotIds] = ids.to(at::kLong).contiguous();
  o[kSlotY] = at::empty({o[kSlotIds].numel(), w.k}, w.rows.options().dtype(type));
  Problem p;
  p.op = Op::kEmbedding;
  p.m = o[kSlotIds].numel();
  p.n = w.rows.size(0);
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(type);
  run(e, p, o);
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(w.k);
  return o[kSlotY].view(shape);
}

at::Tensor quantize(const at::Tensor& w, std::string_view format,
                    const OptionalTensor& importance) {
  check_quantize(w, format, importance);
  OptionalTensor given;
  if (importance) given = importance->detach().to(at::kCPU);
  return call_quantize(w.detach().to(at::kCPU), format, given).to(w.device());
}

at::Tensor probe(const Engine& e, const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  Problem p;
  p.op = check_probe(x, x2, op);
  p.dtype = dtype_of(x.scalar_type());
  const bool is_dot = p.op == Op::kDot;
  (is_dot ? p.k : p.n) = x.numel();
  Operands o;
  o[kSlotX] = x.contiguous();
  o[kSlotX2] = x2.contiguous();
  o[kSlotY] = is_dot ? at::empty({}, x.options()) : at::empty(x.sizes(), x.options());
  run(e, p, o);
  return o[kSlotY];
}

}  // namespace metalmm::gpu
