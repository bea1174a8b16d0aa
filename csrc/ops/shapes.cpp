// The sizes of every op's result, for fake and meta tensors: _<op>_shape takes the arguments of the
// op and runs the checks that the engines run, so that a bad call fails alike wherever it is
// traced. torch_metalmm/ops.py makes the fake implementations of these.
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "attention/checks.h"
#include "checks.h"
#include "experts/checks.h"
#include "strategies.h"

namespace metalmm {
namespace {

using Shape = std::vector<c10::SymInt>;

// The sizes of x, the last one replaced by n.
Shape with_last(const at::Tensor& x, c10::SymInt n) {
  Shape out = x.sym_sizes().vec();
  out.back() = std::move(n);
  return out;
}

Shape linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
             std::string_view format, OptionalName strategy, const OptionalTensor& residual,
             OptionalName activations) {
  const WeightShape w = check_linear(x, weight, bias, format, residual);
  check_strategy(strategy, x, check_activations(activations, x));
  return with_last(x, w.n);
}

Shape norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight, double eps, double offset,
                  const at::Tensor& weight, const OptionalTensor& bias, std::string_view format,
                  const OptionalTensor& residual, OptionalName activations) {
  const WeightShape w =
      check_norm_linear(x, norm_weight, eps, offset, weight, bias, format, residual);
  check_activations(activations, x);
  return with_last(x, w.n);
}

Shape rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, double offset,
               const OptionalTensor& residual) {
  check_rms_norm(x, weight, eps, offset, residual);
  return x.sym_sizes().vec();
}

std::tuple<Shape, Shape> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                      const OptionalTensor& weight, double eps, double offset) {
  const Shape out = rms_norm(x, weight, eps, offset, residual);
  return {out, out};
}

std::tuple<Shape, Shape, Shape> rope(const at::Tensor& qkv, const at::Tensor& cos,
                                     const at::Tensor& sin, int64_t heads, int64_t kv_heads,
                                     const OptionalTensor& v, const OptionalTensor& q_norm,
                                     const OptionalTensor& k_norm, double eps, double offset,
                                     bool) {
  const RopeShape r = check_rope(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset);
  const Shape kv{r.batch, kv_heads, r.positions, r.dim};
  return {{r.batch, heads, r.positions, r.dim}, kv, kv};
}

void cache_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k,
                  const at::Tensor& v, const at::Tensor& slots, std::string_view format_k,
                  std::string_view format_v) {
  check_cache_append(keys, values, k, v, slots, format_k, format_v);
}

Shape rope_append(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                  int64_t heads, int64_t kv_heads, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& slots, std::string_view format_k, std::string_view format_v,
                  const OptionalTensor& v, const OptionalTensor& q_norm,
                  const OptionalTensor& k_norm, double eps, double offset, bool interleaved) {
  const RopeShape r =
      check_rope_append(qkv, cos, sin, heads, kv_heads, keys, values, slots, format_k, format_v,
                        {v, q_norm, k_norm, eps, offset, interleaved})
          .rope;
  return {r.batch, heads, r.positions, r.dim};
}

Shape attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                std::string_view format_k, std::string_view format_v, const OptionalTensor& length,
                const OptionalTensor& mask, std::optional<double> scale, double softcap,
                int64_t window, const OptionalTensor& sinks, bool causal, OptionalName strategy) {
  const AttentionShape s = check_attention(q, keys, values, format_k, format_v, length,
                                           {mask, scale, softcap, window, sinks, causal, strategy});
  return {s.cache.batch, s.queries, s.heads, s.cache.dim};
}

Shape linear_input_grad(const at::Tensor& grad, const at::Tensor& weight, std::string_view format,
                        c10::SymInt in_features) {
  return with_last(grad, check_input_grad(grad, weight, format, in_features).k);
}

Shape swiglu(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
             std::string_view format_gate, std::string_view format_up, std::string_view activation,
             const OptionalTensor& norm_weight, std::optional<double> eps, double offset,
             OptionalName activations) {
  const GateUpShape shape = check_swiglu(x, gate_weight, up_weight, format_gate, format_up,
                                         activation, norm_weight, eps, offset);
  check_activations(activations, x);
  return with_last(x, shape.gate.n);
}

Shape swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                    const OptionalTensor& bias, std::string_view format,
                    std::string_view activation, const OptionalTensor& residual,
                    OptionalName activations) {
  const DownShape shape = check_swiglu_linear(gate, up, weight, bias, format, activation, residual);
  check_activations(activations, gate);
  return with_last(gate, shape.weight.n);
}

Shape expert_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                    const OptionalTensor& bias, std::string_view format,
                    const OptionalTensor& scores, OptionalName strategy, OptionalName activations) {
  const ExpertShape e = check_expert_linear(x, weight, ids, bias, format, scores);
  check_expert_strategy(strategy, x, check_activations(activations, x),
                        scores.has_value() ? Op::kExpertDown : Op::kExpertLinear);
  if (scores.has_value()) return {e.tokens, e.weight.n};
  return {e.tokens, e.choices, e.weight.n};
}

Shape expert_input_grad(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& ids,
                        std::string_view format, c10::SymInt in_features) {
  check_expert_input_grad(grad, weight, ids, format, in_features);
  return with_last(grad, std::move(in_features));
}

Shape expert_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                    const OptionalTensor& bias, std::string_view format,
                    std::string_view activation, bool interleaved, const OptionalTensor& up_weight,
                    std::optional<double> limit, double alpha, OptionalName strategy,
                    OptionalName activations) {
  const ExpertShape e = check_expert_swiglu(x, weight, ids, bias, format,
                                            {activation, interleaved, up_weight, limit, alpha})
                            .experts;
  check_expert_strategy(strategy, x, check_activations(activations, x), Op::kExpertUp);
  return {e.tokens, e.choices, e.weight.n};
}

template <int64_t kDim>
Shape scaled(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
             const OptionalTensor& c, double alpha, double beta, OptionalName strategy) {
  const WeightShape w = check_scaled(x, weight, format, c, alpha, beta, kDim);
  check_strategy(strategy, x);
  return with_last(x, w.n);
}

constexpr auto* gemv = scaled<1>;
constexpr auto* gemm = scaled<2>;

Shape dequantize(const at::Tensor& weight, std::string_view format, OptionalSize in_features,
                 std::optional<at::ScalarType> dtype) {
  check_dtype(dtype);
  const WeightShape w = check_dequantize(weight, format, in_features);
  return {w.n, w.k};
}

Shape quantize(const at::Tensor& w, std::string_view format, const OptionalTensor& importance) {
  const Format& f = check_quantize(w, format, importance);
  return with_last(w, f.row_bytes(w.sym_size(1)));
}

Shape embedding(const at::Tensor& ids, const at::Tensor& weight, std::string_view format,
                OptionalSize in_features, std::optional<at::ScalarType> dtype) {
  check_dtype(dtype);
  Shape out = ids.sym_sizes().vec();
  out.push_back(check_embedding(ids, weight, format, in_features).k);
  return out;
}

Shape probe(const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  return check_probe(x, x2, op) == Op::kDot ? Shape{} : x.sym_sizes().vec();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(metalmm, m) {
#define MM_SIZE "SymInt"
#define MM_RESULT "SymInt[]"
#define MM_OP(name, arguments, results) m.def("_" #name "_shape(" arguments ") -> " results, name);
#include "ops.def"
}

}  // namespace metalmm
