// Gradients for activations, bias and c, for every engine: written in terms of the ops themselves.
// Packed weights are frozen.
//
// In C++ because a Python autograd formula costs every call of the op: see bench/results.md, "op
// overhead".
#include <torch/library.h>

#include <string>

#include "attention/autograd.h"
#include "attention/checks.h"
#include "attention/memory.h"
#include "composed.h"
#include "experts/checks.h"
#include "gradients.h"
#include "recurrent.h"
#include "tensors.h"

namespace metalmm::gradients {
namespace {

// The gradient of an addend of y: summed over the dimensions it was broadcast over, in its own
// dtype.
Tensor bias_grad(const Tensor& grad, at::ScalarType type) {
  const Tensor g = grad.to(at::kFloat);
  return (g.dim() > 1 ? g.flatten(0, -2).sum(0) : g).to(type);
}

// Saves the dtypes that the gradients of bias and residual need.
void save_addends(AutogradContext* ctx, const OptionalTensor& bias,
                  const OptionalTensor& residual) {
  const auto save = [&](const char* name, const OptionalTensor& t) {
    if (needs_grad(t)) ctx->saved_data[name] = static_cast<int64_t>(t->scalar_type());
  };
  save("bias_type", bias);
  save("residual_type", residual);
}

void addend_grads(AutogradContext* ctx, const Tensor& grad, Tensor* bias, Tensor* residual) {
  const auto type = [&](const char* name) {
    return static_cast<at::ScalarType>(ctx->saved_data[name].toInt());
  };
  if (ctx->saved_data.count("bias_type")) *bias = bias_grad(grad, type("bias_type"));
  if (ctx->saved_data.count("residual_type")) *residual = grad.to(type("residual_type"));
}

struct Linear {
  static void save(AutogradContext* ctx, const args::linear& a) {
    ctx->save_for_backward({a.weight});
    ctx->saved_data["format"] = std::string(a.format);
    ctx->saved_data["in_features"] = last_size(a.x);
    save_addends(ctx, a.bias, a.residual);
  }
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    using At = linear_at;
    const Tensor w = ctx->get_saved_variables()[0];
    if (ctx->needs_input_grad(At::x)) {
      out[At::x] = call(args::linear_input_grad{grad, w, ctx->saved_data["format"].toStringRef(),
                                                ctx->saved_data["in_features"].toInt()});
    }
    addend_grads(ctx, grad, &out[At::bias], &out[At::residual]);
  }
};

struct InputGrad {
  static void save(AutogradContext* ctx, const args::linear_input_grad& a) {
    ctx->save_for_backward({a.weight});
    ctx->saved_data["format"] = std::string(a.format);
  }
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    out[linear_input_grad_at::grad] =
        call(args::linear{grad, ctx->get_saved_variables()[0], std::nullopt,
                          ctx->saved_data["format"].toStringRef()});
  }
};

struct SwiGLU {
  static void save(AutogradContext* ctx, const args::swiglu& a) {
    ctx->save_for_backward({a.x, a.gate_weight, a.up_weight});
    ctx->saved_data["format_gate"] = std::string(a.format_gate);
    ctx->saved_data["format_up"] = std::string(a.format_up);
    ctx->saved_data["activation"] = std::string(a.activation);
    ctx->saved_data["activations"] = owned(a.activations);
    ctx->saved_data["gate_scale"] = a.gate_scale;
  }
  // gate and up are computed again: saving them would hold two f32 [M, N] per layer.
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &gate_weight = saved[1], &up_weight = saved[2];
    const std::string format_gate = ctx->saved_data["format_gate"].toStringRef(),
                      format_up = ctx->saved_data["format_up"].toStringRef();
    const Activation activation = activation_by_name(ctx->saved_data["activation"].toStringRef());
    const Tensor x32 = x.to(at::kFloat), g = grad.to(at::kFloat);
    const auto activations = ctx->saved_data["activations"].toOptional<std::string>();
    const auto again = [&](const Tensor& w, const std::string& format) {
      return call(
          args::linear{x32, w, std::nullopt, format, std::nullopt, std::nullopt, activations});
    };
    const auto of_x = [&](const Tensor& of_rows, const Tensor& w, const std::string& format) {
      return call(args::linear_input_grad{of_rows, w, format, last_size(x)});
    };
    const double scale = ctx->saved_data["gate_scale"].toDouble();
    const Tensor gate = again(gate_weight, format_gate) * scale, up = again(up_weight, format_up);
    const Tensor of_gate = g * up * composed::slope(gate, activation) * scale;
    const Tensor dx = of_x(of_gate, gate_weight, format_gate) +
                      of_x(g * composed::activate(gate, activation), up_weight, format_up);
    out[swiglu_at::x] = dx.to(x.scalar_type());
  }
};

struct SwiGLULinear {
  static void save(AutogradContext* ctx, const args::swiglu_linear& a) {
    ctx->save_for_backward({a.gate, a.up, a.weight});
    ctx->saved_data["format"] = std::string(a.format);
    ctx->saved_data["activation"] = std::string(a.activation);
    save_addends(ctx, a.bias, a.residual);
  }
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    using At = swiglu_linear_at;
    const variable_list saved = ctx->get_saved_variables();
    const Activation activation = activation_by_name(ctx->saved_data["activation"].toStringRef());
    const Tensor gate = saved[0].to(at::kFloat), up = saved[1].to(at::kFloat);
    const Tensor dh = call(args::linear_input_grad{
        grad.to(at::kFloat), saved[2], ctx->saved_data["format"].toStringRef(), last_size(gate)});
    if (ctx->needs_input_grad(At::gate)) {
      out[At::gate] = (dh * up * composed::slope(gate, activation)).to(saved[0].scalar_type());
    }
    if (ctx->needs_input_grad(At::up)) {
      out[At::up] = (dh * composed::activate(gate, activation)).to(saved[1].scalar_type());
    }
    addend_grads(ctx, grad, &out[At::bias], &out[At::residual]);
  }
};

// gemv or gemm: y = alpha x Wᵀ + beta c
template <class Args, class At>
struct Scaled {
  static void save(AutogradContext* ctx, const Args& a) {
    ctx->save_for_backward({a.weight});
    ctx->saved_data["format"] = std::string(a.format);
    ctx->saved_data["alpha"] = a.alpha;
    ctx->saved_data["beta"] = a.beta;
    ctx->saved_data["in_features"] = last_size(a.x);
    if (needs_grad(a.c)) ctx->saved_data["c_type"] = static_cast<int64_t>(a.c->scalar_type());
  }
  static void backward(AutogradContext* ctx, const Tensor& grad, variable_list& out) {
    const Tensor w = ctx->get_saved_variables()[0], g = grad.to(at::kFloat);
    if (ctx->needs_input_grad(At::x)) {
      out[At::x] = call(args::linear_input_grad{g * ctx->saved_data["alpha"].toDouble(), w,
                                                ctx->saved_data["format"].toStringRef(),
                                                ctx->saved_data["in_features"].toInt()})
                       .to(grad.scalar_type());
    }
    if (ctx->saved_data.count("c_type")) {
      out[At::c] = (g * ctx->saved_data["beta"].toDouble())
                       .to(static_cast<at::ScalarType>(ctx->saved_data["c_type"].toInt()));
    }
  }
};

}  // namespace

Tensor recorded(const args::linear& a) { return record<Linear>(a); }
Tensor recorded(const args::linear_input_grad& a) { return record<InputGrad>(a); }
Tensor recorded(const args::swiglu_linear& a) { return record<SwiGLULinear>(a); }
Tensor recorded(const args::gemv& a) { return record<Scaled<args::gemv, gemv_at>>(a); }
Tensor recorded(const args::gemm& a) {
  if (a.softcap == 0) return record<Scaled<args::gemm, gemm_at>>(a);
  const Tensor y =
      call(args::gemm{a.x.to(at::kFloat), a.weight, a.format, a.c, a.alpha, a.beta, a.strategy, 0});
  return stored(composed::soft_cap(y, a.softcap), a.x.scalar_type());
}

// The norm is an op of its own, whose result is f32.
Tensor recorded(const args::norm_linear& a) {
  const OptionalTensor none;
  const bool has_factors = a.factors.has_value();
  Tensor y =
      call(args::linear{composed::rms_norm(a.x, a.norm_weight, a.eps, a.offset), a.weight, a.bias,
                        a.format, std::nullopt, has_factors ? none : a.residual, a.activations});
  if (has_factors) y = y * a.factors->to(at::kFloat);
  if (has_factors && a.residual.has_value()) y = y + *a.residual;
  return y.to(a.x.scalar_type());
}

Tensor recorded(const args::swiglu& a) {
  const Tensor rows =
      a.eps.has_value() ? composed::rms_norm(a.x, a.norm_weight, *a.eps, a.offset) : a.x;
  const args::swiglu of_rows{rows,        a.gate_weight, a.up_weight,  a.format_gate,
                             a.format_up, a.activation,  std::nullopt, std::nullopt,
                             0,           a.activations, a.gate_scale};
  return record<SwiGLU>(of_rows).to(a.x.scalar_type());
}

Tensor recorded(const args::rms_norm& a) {
  Tensor y = composed::rms_norm(a.x, a.weight, a.eps, a.offset);
  if (a.gate.has_value()) y = y * at::silu(a.gate->to(at::kFloat));
  return stored(a.residual.has_value() ? y + *a.residual : y, a.x.scalar_type());
}

std::tuple<Tensor, Tensor> recorded(const args::add_rms_norm& a) {
  const Tensor sum = stored(a.x.to(at::kFloat) + a.residual, a.x.scalar_type());
  return {stored(composed::rms_norm(sum, a.weight, a.eps, a.offset), a.x.scalar_type()), sum};
}

Tensor recorded(const args::hadamard& a) {
  return stored(composed::hadamard(a.x), a.x.scalar_type());
}

Heads recorded(const args::rope& a) { return composed::rope(a, check(a).has_whole_norms); }

namespace {

template <class Args>
Tensor recorded_state(const Args& a, const Tensor& rows, Tensor (*composed)(const Args&)) {
  check_written(a);
  TORCH_CHECK_VALUE(!needs_grad(a.state), "state: requires grad, but ", OpOf<Args>::kName,
                    " writes it; pass state.detach()");
  if (rows.size(1) > 0) return composed(a);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call(a);
}

}  // namespace

Tensor recorded(const args::causal_conv& a) {
  return recorded_state(a, a.x, composed::causal_conv);
}
Tensor recorded(const args::gated_delta& a) {
  return recorded_state(a, a.qkv, composed::gated_delta);
}
Tensor recorded(const args::ssm_scan& a) { return recorded_state(a, a.xbc, composed::ssm_scan); }

namespace {

bool has_tangent(const Tensor& t) { return t._fw_grad(0).defined(); }
bool has_tangent(const OptionalTensor& t) { return t.has_value() && has_tangent(*t); }

// ValueError where a packed weight is to be trained.
template <class Kind>
void check_frozen(const Field<Kind>& f) {
  if constexpr (is_weight<Kind>) {
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !needs_grad(f.value), f.name,
                      ": requires grad, but weights of metalmm ops are frozen; pass ", f.name,
                      ".detach()");
  }
}

// NotImplementedError where a tensor has a forward-mode tangent, with gradients on or off: it would
// be lost, and the result's be zero.
template <class Kind>
void check_tangent(const char* op, const Field<Kind>& f) {
  if constexpr (is_tensor<Kind> && !is_weight<Kind>) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !has_tangent(f.value), "metalmm.", op,
        ": has no forward-mode derivative (jvp, jacfwd, dual tensors), only a backward; use "
        "torch.autograd.functional.jvp or jacobian");
  }
}

template <class Kind>
bool records(const Field<Kind>& f) {
  if constexpr (is_tensor<Kind> && !is_weight<Kind>) {
    return needs_grad(f.value);
  } else {
    return false;
  }
}

// ValueError that names the argument.
template <class Kind>
void check_no_grad(const char* op, const Field<Kind>& f) {
  TORCH_CHECK_VALUE(!records(f), f.name, ": requires grad, but ", op, " has no gradient; pass ",
                    f.name, ".detach(), or call it under torch.no_grad()");
}

// A new version of an argument that an op writes, as autograd asks.
template <class Kind>
void bump_version(const Field<Kind>& f) {
  if constexpr (is_written<Kind>) {
    if (!f.value.is_inference()) f.value.unsafeGetTensorImpl()->bump_version();
  }
}

// Whether the call records a gradient, checked.
template <class Args>
bool records_grad(const Args& a) {
  return with_fields(a, [](const Args&, const auto&... field) {
    (check_frozen(field), ...);
    (check_tangent(OpOf<Args>::kName, field), ...);
    return at::GradMode::is_enabled() && (records(field) || ...);
  });
}

// The op below Autograd, which counts what is written.
template <class Args>
typename OpOf<Args>::Result computed(const Args& a) {
  return with_fields(a, [](const Args& all, const auto&... field) {
    const auto below = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return call(all);
    };
    if constexpr (std::is_void_v<typename OpOf<Args>::Result>) {
      below();
      (bump_version(field), ...);
    } else {
      auto out = below();
      (bump_version(field), ...);
      return out;
    }
  });
}

template <class Args>
typename OpOf<Args>::Result differentiable(const Args& a) {
  if (!records_grad(a)) return computed(a);
  check(a);  // before recorded() computes with other ops, or keeps what its backward reads
  return recorded(a);
}

template <class Args>
typename OpOf<Args>::Result forward_only(const Args& a) {
  if (records_grad(a)) {
    with_fields(a, [](const Args&, const auto&... field) {
      (check_no_grad(OpOf<Args>::kName, field), ...);
    });
  }
  return computed(a);
}

// Ops without a result: see cache_append_of_views.
void register_views(torch::Library& m) {
  implement<args::cache_append>(m, Kernel<args::cache_append, &cache_append_of_views>::run);
  m.impl("_cache_append_shape", torch::CppFunction::makeFallthrough());
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, Negative, m) { register_views(m); }
TORCH_LIBRARY_IMPL(metalmm, Conjugate, m) { register_views(m); }

TORCH_LIBRARY_IMPL(metalmm, Autograd, m) {
#define MM_HOST_OP(name, ...)  // its result has no gradient
#define MM_FORWARD_OP(name, ...) \
  implement<args::name>(m, Kernel<args::name, &forward_only<args::name>>::run);
#define MM_OP(name, ...) \
  implement<args::name>(m, Kernel<args::name, &differentiable<args::name>>::run);
#include "ops.def"
}

}  // namespace metalmm::gradients
