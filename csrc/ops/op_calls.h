// The ops, called through the dispatcher: what autograd, autocast and what one engine takes
// from another are written in terms of.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace metalmm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Name = std::string_view;
using OptionalName = std::optional<std::string_view>;

template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline Tensor call_linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias, Name format,
                          OptionalName strategy = std::nullopt,
                          const OptionalTensor& residual = std::nullopt,
                          OptionalName activations = std::nullopt) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, Name, OptionalName,
                     const OptionalTensor&, OptionalName)>("metalmm::linear");
  return op.call(x, w, bias, format, strategy, residual, activations);
}

inline Tensor call_norm_linear(const Tensor& x, const OptionalTensor& norm_weight, double eps,
                               double offset, const Tensor& w, const OptionalTensor& bias,
                               Name format, const OptionalTensor& residual,
                               OptionalName activations) {
  static auto op =
      find_op<Tensor(const Tensor&, const OptionalTensor&, double, double, const Tensor&,
                     const OptionalTensor&, Name, const OptionalTensor&, OptionalName)>(
          "metalmm::norm_linear");
  return op.call(x, norm_weight, eps, offset, w, bias, format, residual, activations);
}

inline Tensor call_rms_norm(const Tensor& x, const OptionalTensor& weight, double eps,
                            double offset, const OptionalTensor& residual) {
  static auto op =
      find_op<Tensor(const Tensor&, const OptionalTensor&, double, double, const OptionalTensor&)>(
          "metalmm::rms_norm");
  return op.call(x, weight, eps, offset, residual);
}

inline std::tuple<Tensor, Tensor> call_add_rms_norm(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, double eps,
                                                    double offset) {
  static auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                         double, double)>("metalmm::add_rms_norm");
  return op.call(x, residual, weight, eps, offset);
}

using Heads = std::tuple<Tensor, Tensor, Tensor>;  // q, k, v
inline Heads call_rope(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads,
                       int64_t kv_heads, const OptionalTensor& v, const OptionalTensor& q_norm,
                       const OptionalTensor& k_norm, double eps, double offset, bool interleaved) {
  static auto op = find_op<Heads(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t,
                                 const OptionalTensor&, const OptionalTensor&,
                                 const OptionalTensor&, double, double, bool)>("metalmm::rope");
  return op.call(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset, interleaved);
}

inline Tensor call_input_grad(const Tensor& grad, const Tensor& w, Name format,
                              int64_t in_features) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, Name, int64_t)>("metalmm::linear_input_grad");
  return op.call(grad, w, format, in_features);
}

inline Tensor call_swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu,
                          Name activation, const OptionalTensor& norm_weight,
                          std::optional<double> eps, double offset, OptionalName activations) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, Name, Name, Name,
                     const OptionalTensor&, std::optional<double>, double, OptionalName)>(
          "metalmm::swiglu");
  return op.call(x, wg, wu, fg, fu, activation, norm_weight, eps, offset, activations);
}

inline Tensor call_swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                                 const OptionalTensor& bias, Name format, Name activation,
                                 const OptionalTensor& residual, OptionalName activations) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Name, Name,
                     const OptionalTensor&, OptionalName)>("metalmm::swiglu_linear");
  return op.call(gate, up, w, bias, format, activation, residual, activations);
}

using ScaledSignature = Tensor(const Tensor&, const Tensor&, Name, const OptionalTensor&, double,
                               double, OptionalName);
inline Tensor call_gemv(const Tensor& x, const Tensor& w, Name format, const OptionalTensor& c,
                        double alpha, double beta, OptionalName strategy) {
  static auto op = find_op<ScaledSignature>("metalmm::gemv");
  return op.call(x, w, format, c, alpha, beta, strategy);
}
inline Tensor call_gemm(const Tensor& x, const Tensor& w, Name format, const OptionalTensor& c,
                        double alpha, double beta, OptionalName strategy) {
  static auto op = find_op<ScaledSignature>("metalmm::gemm");
  return op.call(x, w, format, c, alpha, beta, strategy);
}

inline Tensor call_dequantize(const Tensor& w, Name format, std::optional<int64_t> in_features,
                              std::optional<at::ScalarType> dtype) {
  static auto op =
      find_op<Tensor(const Tensor&, Name, std::optional<int64_t>, std::optional<at::ScalarType>)>(
          "metalmm::dequantize");
  return op.call(w, format, in_features, dtype);
}

inline Tensor call_quantize(const Tensor& w, Name format, const OptionalTensor& importance) {
  static auto op = find_op<Tensor(const Tensor&, Name, const OptionalTensor&)>("metalmm::quantize");
  return op.call(w, format, importance);
}

inline Tensor call_embedding(const Tensor& ids, const Tensor& w, Name format,
                             std::optional<int64_t> in_features,
                             std::optional<at::ScalarType> dtype) {
  static auto op = find_op<Tensor(const Tensor&, const Tensor&, Name, std::optional<int64_t>,
                                  std::optional<at::ScalarType>)>("metalmm::embedding");
  return op.call(ids, w, format, in_features, dtype);
}

inline Tensor call_probe(const Tensor& x, const Tensor& x2, Name op_name) {
  static auto op = find_op<Tensor(const Tensor&, const Tensor&, Name)>("metalmm::probe");
  return op.call(x, x2, op_name);
}

}  // namespace metalmm
