// The ops, called through the dispatcher: what autograd, autocast and what one engine takes
// from another are written in terms of.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>

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
                          OptionalName strategy) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, Name, OptionalName)>(
          "metalmm::linear");
  return op.call(x, w, bias, format, strategy);
}

inline Tensor call_input_grad(const Tensor& grad, const Tensor& w, Name format,
                              int64_t in_features) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, Name, int64_t)>("metalmm::linear_input_grad");
  return op.call(grad, w, format, in_features);
}

inline Tensor call_swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, Name, Name)>("metalmm::swiglu");
  return op.call(x, wg, wu, fg, fu);
}

inline Tensor call_swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                                 const OptionalTensor& bias, Name format) {
  static auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Name)>(
          "metalmm::swiglu_linear");
  return op.call(gate, up, w, bias, format);
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

inline Tensor call_quantize(const Tensor& w, Name format) {
  static auto op = find_op<Tensor(const Tensor&, Name)>("metalmm::quantize");
  return op.call(w, format);
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
