// The sizes of every op's result, for fake and meta tensors: _<op>_shape takes the arguments of the
// op and runs the checks that the engines run, so that a bad call fails alike wherever it is
// traced. torch_metalmm/ops.py makes the fake implementations of these.
#include <torch/library.h>

#include <iterator>
#include <string>
#include <vector>

#include "checks.h"
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
             std::string_view format, OptionalName strategy) {
  const WeightShape w = check_linear(x, weight, bias, format);
  check_strategy(strategy, x);
  return with_last(x, w.n);
}

Shape linear_input_grad(const at::Tensor& grad, const at::Tensor& weight, std::string_view format,
                        c10::SymInt in_features) {
  return with_last(grad, check_input_grad(grad, weight, format, in_features).k);
}

Shape swiglu(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
             std::string_view format_gate, std::string_view format_up) {
  return with_last(x, check_swiglu(x, gate_weight, up_weight, format_gate, format_up).gate.n);
}

Shape swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                    const OptionalTensor& bias, std::string_view format) {
  return with_last(gate, check_swiglu_linear(gate, up, weight, bias, format).n);
}

template <int64_t kDim>
Shape scaled(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
             const OptionalTensor& c, double, double beta, OptionalName strategy) {
  const WeightShape w = check_scaled(x, weight, format, c, beta, kDim);
  check_strategy(strategy, x);
  return with_last(x, w.n);
}

Shape dequantize(const at::Tensor& weight, std::string_view format, OptionalSize in_features,
                 std::optional<at::ScalarType> dtype) {
  check_dtype(dtype);
  const WeightShape w = check_dequantize(weight, format, in_features);
  return {w.n, w.k};
}

Shape quantize(const at::Tensor& w, std::string_view format) {
  const Format& f = check_quantize(w, format);
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
  m.def(
      "_linear_shape(Tensor x, Tensor weight, Tensor? bias, str format, str? strategy=None) -> "
      "SymInt[]",
      linear);
  m.def(
      "_linear_input_grad_shape(Tensor grad, Tensor weight, str format, SymInt in_features) -> "
      "SymInt[]",
      linear_input_grad);
  m.def(
      "_swiglu_shape(Tensor x, Tensor gate_weight, Tensor up_weight, str format_gate, str "
      "format_up) -> SymInt[]",
      swiglu);
  m.def(
      "_swiglu_linear_shape(Tensor gate, Tensor up, Tensor weight, Tensor? bias, str format) -> "
      "SymInt[]",
      swiglu_linear);
  m.def(
      "_gemv_shape(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float "
      "beta=0, str? strategy=None) -> SymInt[]",
      scaled<1>);
  m.def(
      "_gemm_shape(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float "
      "beta=0, str? strategy=None) -> SymInt[]",
      scaled<2>);
  m.def(
      "_dequantize_shape(Tensor weight, str format, SymInt? in_features=None, *, ScalarType? "
      "dtype=None) -> SymInt[]",
      dequantize);
  m.def("_quantize_shape(Tensor w, str format) -> SymInt[]", quantize);
  m.def(
      "_embedding_shape(Tensor ids, Tensor weight, str format, SymInt? in_features=None, *, "
      "ScalarType? dtype=None) -> SymInt[]",
      embedding);
  m.def("_probe_shape(Tensor x, Tensor x2, str op) -> SymInt[]", probe);
}

}  // namespace metalmm
