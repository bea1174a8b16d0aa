// Under torch.autocast a matmul takes its activations, arguments of the kind Rows, in the autocast
// dtype. Weights are packed; bias, residual, c and scores are multiplied or added in f32 whatever
// their dtype, and a cache keeps its format. Ops without such rows keep the dtypes they are given.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <type_traits>

#include "args.h"

namespace metalmm {
namespace {

// The kernel of an op: its rows in the autocast dtype of kDevice, with autocast off meanwhile.
template <c10::DeviceType kDevice>
struct Lowered {
  static Tensor pass(const Field<kind::Rows>& f) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), f.value, kDevice);
  }
  template <class Kind>
  static typename Kind::Given pass(const Field<Kind>& f) {
    return f.value;
  }

  template <class Args>
  static typename OpOf<Args>::Result run(const Args& a) {
    const c10::impl::ExcludeDispatchKeyGuard guard(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    return with_fields(
        a, [](const Args&, const auto&... field) { return call(Args{pass(field)...}); });
  }
};

template <class... Kind>
constexpr bool has_rows(Kinds<Kind...>) {
  return (std::is_same_v<Kind, kind::Rows> || ...);
}

template <c10::DeviceType kDevice>
void register_all(torch::Library& m) {
#define MM_OP(name, ...)                                                                         \
  if constexpr (has_rows(OpOf<args::name>::Arguments{})) {                                       \
    implement<args::name>(m,                                                                     \
                          Kernel<args::name, &Lowered<kDevice>::template run<args::name>>::run); \
  }
#include "ops.def"
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, AutocastCPU, m) { register_all<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastMPS, m) { register_all<at::kMPS>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastCUDA, m) { register_all<at::kCUDA>(m); }

}  // namespace metalmm
