// Gradients for activations, bias and c, for every engine: written in terms of the ops themselves.
// Packed weights are frozen.
//
// In C++ because a Python autograd formula costs every call of the op: see bench/results.md, "op
// overhead".
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "attention/autograd.h"
#include "composed.h"
#include "experts/autograd.h"
#include "gradients.h"
#include "op_calls.h"
#include "tensors.h"

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

// What the gradients of bias and residual need.
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

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w,
                        const OptionalTensor& bias, std::string format,
                        std::optional<std::string> strategy, const OptionalTensor& residual,
                        std::optional<std::string> activations) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({w});
    ctx->saved_data["format"] = format;
    ctx->saved_data["in_features"] = last_size(x);
    save_addends(ctx, bias, residual);
    return call_linear(x, w, bias, format, strategy, residual, activations);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor w = ctx->get_saved_variables()[0];
    variable_list out(7);
    if (ctx->needs_input_grad(0)) {
      out[0] = call_input_grad(grads[0], w, ctx->saved_data["format"].toStringRef(),
                               ctx->saved_data["in_features"].toInt());
    }
    addend_grads(ctx, grads[0], &out[2], &out[5]);
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
    return {call_linear(grads[0], w, std::nullopt, ctx->saved_data["format"].toStringRef()),
            Tensor(), Tensor(), Tensor()};
  }
};

struct SwiGLU : torch::autograd::Function<SwiGLU> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& wg, const Tensor& wu,
                        std::string fg, std::string fu, std::string activation,
                        std::optional<std::string> activations) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, wg, wu});
    ctx->saved_data["fg"] = fg;
    ctx->saved_data["fu"] = fu;
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["activations"] = activations;
    return call_swiglu(x, wg, wu, fg, fu, activation, std::nullopt, std::nullopt, 0, activations);
  }
  // gate and up are computed again: saving them would hold two f32 [M, N] per layer.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &wg = saved[1], &wu = saved[2];
    const std::string fg = ctx->saved_data["fg"].toStringRef(),
                      fu = ctx->saved_data["fu"].toStringRef();
    const Activation activation = activation_by_name(ctx->saved_data["activation"].toStringRef());
    const Tensor x32 = x.to(at::kFloat), g = grads[0].to(at::kFloat);
    const auto activations = ctx->saved_data["activations"].toOptional<std::string>();
    const auto again = [&](const Tensor& w, const std::string& format) {
      return call_linear(x32, w, std::nullopt, format, std::nullopt, std::nullopt, activations);
    };
    const Tensor gate = again(wg, fg), up = again(wu, fu);
    const int64_t k = last_size(x);
    const Tensor dx = call_input_grad(g * up * composed::slope(gate, activation), wg, fg, k) +
                      call_input_grad(g * composed::activate(gate, activation), wu, fu, k);
    variable_list out(7);
    out[0] = dx.to(x.scalar_type());
    return out;
  }
};

struct SwiGLULinear : torch::autograd::Function<SwiGLULinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up, const Tensor& w,
                        const OptionalTensor& bias, std::string format, std::string activation,
                        const OptionalTensor& residual, std::optional<std::string> activations) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up, w});
    ctx->saved_data["format"] = format;
    ctx->saved_data["activation"] = activation;
    save_addends(ctx, bias, residual);
    return call_swiglu_linear(gate, up, w, bias, format, activation, residual, activations);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Activation activation = activation_by_name(ctx->saved_data["activation"].toStringRef());
    const Tensor gate = saved[0].to(at::kFloat), up = saved[1].to(at::kFloat);
    const Tensor dh = call_input_grad(grads[0].to(at::kFloat), saved[2],
                                      ctx->saved_data["format"].toStringRef(), last_size(gate));
    variable_list out(8);
    if (ctx->needs_input_grad(0)) {
      out[0] = (dh * up * composed::slope(gate, activation)).to(saved[0].scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      out[1] = (dh * composed::activate(gate, activation)).to(saved[1].scalar_type());
    }
    addend_grads(ctx, grads[0], &out[3], &out[6]);
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

// The Autograd kernels. Without a gradient to record they cost one check and one redispatch.
Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias, Name format,
              OptionalName strategy, const OptionalTensor& residual, OptionalName activations) {
  check_frozen("weight", w);
  if (records_grad("linear", x, bias, residual)) {
    return Linear::apply(x, w, bias, std::string(format), owned(strategy), residual,
                         owned(activations));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear(x, w, bias, format, strategy, residual, activations);
}

// Where a gradient is recorded, the norm is an op of its own, whose result is f32.
Tensor norm_linear(const Tensor& x, const OptionalTensor& norm_weight, double eps, double offset,
                   const Tensor& w, const OptionalTensor& bias, Name format,
                   const OptionalTensor& residual, OptionalName activations) {
  check_frozen("weight", w);
  if (records_grad("norm_linear", x, norm_weight, bias, residual)) {
    check_norm_linear(x, norm_weight, eps, offset, w, bias, format, residual);
    const Tensor rows = composed::rms_norm(x, norm_weight, eps, offset);
    return call_linear(rows, w, bias, format, std::nullopt, residual, activations)
        .to(x.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_norm_linear(x, norm_weight, eps, offset, w, bias, format, residual, activations);
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                const OptionalTensor& residual) {
  if (records_grad("rms_norm", x, weight, residual)) {
    check_rms_norm(x, weight, eps, offset, residual);
    const Tensor y = composed::rms_norm(x, weight, eps, offset);
    return stored(residual.has_value() ? y + *residual : y, x.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_rms_norm(x, weight, eps, offset, residual);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, double eps, double offset) {
  if (records_grad("add_rms_norm", x, residual, weight)) {
    check_rms_norm(x, weight, eps, offset, residual);
    const Tensor sum = stored(x.to(at::kFloat) + residual, x.scalar_type());
    return {stored(composed::rms_norm(sum, weight, eps, offset), x.scalar_type()), sum};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_add_rms_norm(x, residual, weight, eps, offset);
}

Heads rope(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads, int64_t kv_heads,
           const OptionalTensor& v, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
           double eps, double offset, bool interleaved) {
  if (records_grad("rope", qkv, cos, sin, v, q_norm, k_norm)) {
    check_rope(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset);
    return composed::rope(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset,
                          interleaved);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_rope(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset, interleaved);
}

Tensor linear_input_grad(const Tensor& grad, const Tensor& w, Name format, int64_t in_features) {
  check_frozen("weight", w);
  if (records_grad("linear_input_grad", grad)) {
    return InputGrad::apply(grad, w, std::string(format), in_features);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_input_grad(grad, w, format, in_features);
}

Tensor swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu,
              Name activation, const OptionalTensor& norm_weight, std::optional<double> eps,
              double offset, OptionalName activations) {
  check_frozen("gate_weight", wg);
  check_frozen("up_weight", wu);
  if (records_grad("swiglu", x, norm_weight)) {
    check_swiglu(x, wg, wu, fg, fu, activation, norm_weight, eps, offset);
    const Tensor rows = eps.has_value() ? composed::rms_norm(x, norm_weight, *eps, offset) : x;
    return SwiGLU::apply(rows, wg, wu, std::string(fg), std::string(fu), std::string(activation),
                         owned(activations))
        .to(x.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_swiglu(x, wg, wu, fg, fu, activation, norm_weight, eps, offset, activations);
}

Tensor swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                     const OptionalTensor& bias, Name format, Name activation,
                     const OptionalTensor& residual, OptionalName activations) {
  check_frozen("weight", w);
  if (records_grad("swiglu_linear", gate, up, bias, residual)) {
    return SwiGLULinear::apply(gate, up, w, bias, std::string(format), std::string(activation),
                               residual, owned(activations));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_swiglu_linear(gate, up, w, bias, format, activation, residual, activations);
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

constexpr auto* gemv = scaled<call_gemv, kGemv>;
constexpr auto* gemm = scaled<call_gemm, kGemm>;

using gradients::attention;
using gradients::cache_append;
using gradients::expert_input_grad;
using gradients::expert_linear;
using gradients::expert_swiglu;
using gradients::rope_append;

}  // namespace

// Ops without a result: see cache_append_of_views.
void register_views(torch::Library& m) {
  m.impl("cache_append", gradients::cache_append_of_views);
  m.impl("_cache_append_shape", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(metalmm, Negative, m) { register_views(m); }
TORCH_LIBRARY_IMPL(metalmm, Conjugate, m) { register_views(m); }

TORCH_LIBRARY_IMPL(metalmm, Autograd, m) {
#define MM_HOST_OP(name, ...)  // its result has no gradient
#define MM_OP(name, ...) m.impl(#name, name);
#include "ops.def"
}

}  // namespace metalmm
