// What the Autograd kernels share; first of all, whether a call of an op records a gradient.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <string_view>

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

// ValueError where a packed weight is to be trained.
inline void check_frozen(const char* name, const at::Tensor& w) {
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !w.requires_grad(), name,
                    ": requires grad, but weights of metalmm ops are frozen; pass weight.detach()");
}

// A name that outlives the call.
inline std::optional<std::string> owned(std::optional<std::string_view> name) {
  return name.has_value() ? std::optional<std::string>(*name) : std::nullopt;
}

}  // namespace metalmm
