// The Autograd kernels. Without a gradient to record they cost one check and one redispatch; with
// one, recorded() of the op computes its checked arguments, by torch's ops or as a node of
// Recorder.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>

#include "args.h"

namespace metalmm::gradients {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The places of arguments, for what a backward returns.
#define MM_OP(name, results, arguments) \
  struct name##_at {                    \
    enum : int { arguments kCount };    \
  };
#define MM_ARG(type, field) field,
#include "ops.def"

#define MM_OP(name, results, arguments) result::results::Type recorded(const args::name& a);
#define MM_FORWARD_OP(name, ...)
#define MM_HOST_OP(name, ...)
#include "ops.def"

inline bool needs_grad(const Tensor& t) { return t.requires_grad(); }
inline bool needs_grad(const OptionalTensor& t) { return t.has_value() && needs_grad(*t); }

// A node of the graph. Formula::save keeps what its backward reads, and Formula::backward sets the
// gradients that are asked for.
template <class Formula, class Args, class Arguments = typename OpOf<Args>::Arguments>
struct Recorder;
template <class Formula, class Args, class... Kind>
struct Recorder<Formula, Args, Kinds<Kind...>>
    : torch::autograd::Function<Recorder<Formula, Args, Kinds<Kind...>>> {
  static Tensor forward(AutogradContext* ctx, typename Kind::Given... given) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Args a{given...};
    Formula::save(ctx, a);
    return call(a);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(sizeof...(Kind));
    Formula::backward(ctx, grads[0], out);
    return out;
  }
};

template <class Formula, class Args>
Tensor record(const Args& a) {
  return with_fields(a, [](const Args&, const auto&... field) {
    return Recorder<Formula, Args>::apply(field.value...);
  });
}

// A name that outlives the call.
inline std::optional<std::string> owned(OptionalName name) {
  return name.has_value() ? std::optional<std::string>(*name) : std::nullopt;
}

inline int64_t last_size(const Tensor& t) { return t.sym_size(-1).guard_int(__FILE__, __LINE__); }

}  // namespace metalmm::gradients
