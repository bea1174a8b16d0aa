// Gradients for activations, bias and c, for every engine: written in terms of the ops themselves.
// Packed weights are frozen.
//
// In C++ because a Python autograd formula costs every call of the op: see bench/results.md, "op
// overhead".
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "op_calls.h"

namespace metalmm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t last_size(const Tensor& t) { return t.sym_size(-1).guard_int(__FILE__, __LINE__); }

// The gradient of an addend of y: summed over the dimensions it was broadcast over, in its own
// dtype.
Tensor bias_grad(const Tensor& grad, at::ScalarType type) {
  const Tensor g = grad.to(at::kFloat);
  return (g.dim() > 1 ? g.flatten(0, -2).sum(0) : g).to(type);
}

bool needs_grad(const Tensor& t) { return t.requires_grad(); }
bool needs_grad(const OptionalTensor& t) { return t.has_value() && needs_grad(*t); }

bool has_tangent(const Tensor& t) { return t._fw_grad(0).defined(); }
bool has_tangent(const OptionalTensor& t) { return t.has_value() && has_tangent(*t); }

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

void check_frozen(const char* name, const Tensor& w) {
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !w.requires_grad(), name,
                    ": requires grad, but weights of metalmm ops are frozen; pass weight.detach()");
}

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w,
                        const OptionalTensor& bias, std::string format,
                        std::optional<std::string> strategy) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({w});
    ctx->saved_data["format"] = format;
    ctx->saved_data["in_features"] = last_size(x);
    if (needs_grad(bias)) ctx->saved_data["bias_type"] = static_cast<int64_t>(bias->scalar_type());
    return call_linear(x, w, bias, format, strategy);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor w = ctx->get_saved_variables()[0];
    variable_list out(5);
    if (ctx->needs_input_grad(0)) {
      out[0] = call_input_grad(grads[0], w, ctx->saved_data["format"].toStringRef(),
                               ctx->saved_data["in_features"].toInt());
    }
    if (ctx->saved_data.count("bias_type")) {
      out[2] =
          bias_grad(grads[0], static_cast<at::ScalarType>(ctx->saved_data["bias_type"].toInt()));
    }
    return out;
  }
};

struct InputGrad : torch::autograd::Function<InputGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& w,
                        std::string format, int64_t in_features) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({w});
    ctx->saved_data["format"] = format;
    return call_input_grad(grad, w, format, in_features);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor w = ctx->get_saved_variables()[0];
    return {call_linear(grads[0], w, std::nullopt, ctx->saved_data["format"].toStringRef(),
                        std::nullopt),
            Tensor(), Tensor(), Tensor()};
  }
};

// d silu(g) / d g = s (1 + g (1 - s)), s = sigmoid(g)
Tensor silu_slope(const Tensor& g) {
  const Tensor s = g.sigmoid();
  return s * (1 + g * (1 - s));
}

struct SwiGLU : torch::autograd::Function<SwiGLU> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& wg, const Tensor& wu,
                        std::string fg, std::string fu) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, wg, wu});
    ctx->saved_data["fg"] = fg;
    ctx->saved_data["fu"] = fu;
    return call_swiglu(x, wg, wu, fg, fu);
  }
  // gate and up are computed again: saving them would hold two f32 [M, N] per layer.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &wg = saved[1], &wu = saved[2];
    const std::string fg = ctx->saved_data["fg"].toStringRef(),
                      fu = ctx->saved_data["fu"].toStringRef();
    const Tensor x32 = x.to(at::kFloat), g = grads[0].to(at::kFloat);
    const Tensor gate = call_linear(x32, wg, std::nullopt, fg, std::nullopt);
    const Tensor up = call_linear(x32, wu, std::nullopt, fu, std::nullopt);
    const int64_t k = last_size(x);
    const Tensor dx = call_input_grad(g * up * silu_slope(gate), wg, fg, k) +
                      call_input_grad(g * at::silu(gate), wu, fu, k);
    return {dx.to(x.scalar_type()), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct SwiGLULinear : torch::autograd::Function<SwiGLULinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up, const Tensor& w,
                        const OptionalTensor& bias, std::string format) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up, w});
    ctx->saved_data["format"] = format;
    if (needs_grad(bias)) ctx->saved_data["bias_type"] = static_cast<int64_t>(bias->scalar_type());
    return call_swiglu_linear(gate, up, w, bias, format);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor gate = saved[0].to(at::kFloat), up = saved[1].to(at::kFloat);
    const Tensor dh = call_input_grad(grads[0].to(at::kFloat), saved[2],
                                      ctx->saved_data["format"].toStringRef(), last_size(gate));
    variable_list out(5);
    if (ctx->needs_input_grad(0)) out[0] = (dh * up * silu_slope(gate)).to(saved[0].scalar_type());
    if (ctx->needs_input_grad(1)) out[1] = (dh * at::silu(gate)).to(saved[1].scalar_type());
    if (ctx->saved_data.count("bias_type")) {
      out[3] =
          bias_grad(grads[0], static_cast<at::ScalarType>(ctx->saved_data["bias_type"].toInt()));
    }
    return out;
  }
};

// gemv or gemm: y = alpha x Wᵀ + beta c
template <auto kCall>
struct Scaled : torch::autograd::Function<Scaled<kCall>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, std::string format,
                        const OptionalTensor& c, double alpha, double beta,
                        std::optional<std::string> strategy) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({w});
    ctx->saved_data["format"] = format;
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["beta"] = beta;
    ctx->saved_data["in_features"] = last_size(x);
    if (needs_grad(c)) ctx->saved_data["c_type"] = static_cast<int64_t>(c->scalar_type());
    return kCall(x, w, format, c, alpha, beta, strategy);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor w = ctx->get_saved_variables()[0];
    variable_list out(7);
    if (ctx->needs_input_grad(0)) {
      out[0] = call_input_grad(grads[0].to(at::kFloat) * ctx->saved_data["alpha"].toDouble(), w,
                               ctx->saved_data["format"].toStringRef(),
                               ctx->saved_data["in_features"].toInt())
                   .to(grads[0].scalar_type());
    }
    if (ctx->saved_data.count("c_type")) {
      out[3] = (grads[0].to(at::kFloat) * ctx->saved_data["beta"].toDouble())
                   .to(static_cast<at::ScalarType>(ctx->saved_data["c_type"].toInt()));
    }
    return out;
  }
};

std::optional<std::string> owned(OptionalName name) {
  return name.has_value() ? std::optional<std::string>(*name) : std::nullopt;
}

// The Autograd kernels. Without a gradient to record they cost one check and one redispatch.
Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias, Name format,
              OptionalName strategy) {
  check_frozen("weight", w);
  if (records_grad("linear", x, bias)) {
    return Linear::apply(x, w, bias, std::string(format), owned(strategy));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear(x, w, bias, format, strategy);
}

Tensor linear_input_grad(const Tensor& grad, const Tensor& w, Name format, int64_t in_features) {
  check_frozen("weight", w);
  if (records_grad("linear_input_grad", grad)) {
    return InputGrad::apply(grad, w, std::string(format), in_features);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_input_grad(grad, w, format, in_features);
}

Tensor swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu) {
  check_frozen("gate_weight", wg);
  check_frozen("up_weight", wu);
  if (records_grad("swiglu", x)) {
    return SwiGLU::apply(x, wg, wu, std::string(fg), std::string(fu));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_swiglu(x, wg, wu, fg, fu);
}

Tensor swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                     const OptionalTensor& bias, Name format) {
  check_frozen("weight", w);
  if (records_grad("swiglu_linear", gate, up, bias)) {
    return SwiGLULinear::apply(gate, up, w, bias, std::string(format));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_swiglu_linear(gate, up, w, bias, format);
}

Tensor dequantize(const Tensor& w, Name format, std::optional<int64_t> in_features,
                  std::optional<at::ScalarType> dtype) {
  check_frozen("weight", w);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_dequantize(w, format, in_features, dtype);
}

Tensor embedding(const Tensor& ids, const Tensor& w, Name format,
                 std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  check_frozen("weight", w);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_embedding(ids, w, format, in_features, dtype);
}

Tensor probe(const Tensor& x, const Tensor& x2, Name op) {
  TORCH_CHECK_VALUE(!records_grad("probe", x, x2),
                    "x: requires grad, but probe has no gradient; pass x.detach()");
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_probe(x, x2, op);
}

constexpr char kGemv[] = "gemv", kGemm[] = "gemm";

template <auto kCall, const char* op>
Tensor scaled(const Tensor& x, const Tensor& w, Name format, const OptionalTensor& c, double alpha,
              double beta, OptionalName strategy) {
  check_frozen("weight", w);
  if (records_grad(op, x, c)) {
    return Scaled<kCall>::apply(x, w, std::string(format), c, alpha, beta, owned(strategy));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return kCall(x, w, format, c, alpha, beta, strategy);
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, Autograd, m) {
  m.impl("linear", linear);
  m.impl("linear_input_grad", linear_input_grad);
  m.impl("swiglu", swiglu);
  m.impl("swiglu_linear", swiglu_linear);
  m.impl("dequantize", dequantize);
  m.impl("embedding", embedding);
  m.impl("probe", probe);
  m.impl("gemv", scaled<call_gemv, kGemv>);
  m.impl("gemm", scaled<call_gemm, kGemm>);
}

}  // namespace metalmm
