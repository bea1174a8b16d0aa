// Whether a call of an op records a gradient.
#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace metalmm {

inline bool needs_grad(const at::Tensor& t) { return t.requires_grad(); }
inline bool needs_grad(const std::optional<at::Tensor>& t) {
  return t.has_value() && needs_grad(*t);
}

inline bool has_tangent(const at::Tensor& t) { return t._fw_grad(0).defined(); }
inline bool has_tangent(const std::optional<at::Tensor>& t) {
  return t.has_value() && has_tangent(*t);
}

// Whether a gradient is recorded through one of the tensors. NotImplementedError where one has a
// forward-mode tangent, with gradients on or off: it would be lost, and the result's be zero.
template <class... T>
bool records_grad(const char* op, const T&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(has_tangent(tensors) || ...), "metalmm.", op,
      ": has no forward-mode derivative (jvp, jacfwd, dual tensors), only a backward; use "
      "torch.autograd.functional.jvp or jacobian");
  return at::GradMode::is_enabled() && (needs_grad(tensors) || ...);
}

}  // namespace metalmm
