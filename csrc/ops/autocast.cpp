// Under torch.autocast an op takes its activations in the autocast dtype. Weights are packed; bias
// and c are added in f32 whatever their dtype.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "op_calls.h"

namespace metalmm {
namespace {

// Tensors in the autocast dtype of kDevice, with autocast off while this lives.
template <c10::DeviceType kDevice>
class Lowered {
 public:
  Tensor operator()(const Tensor& t) const {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
};

template <c10::DeviceType kDevice>
Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias, Name format,
              OptionalName strategy) {
  const Lowered<kDevice> lower;
  return call_linear(lower(x), w, bias, format, strategy);
}

template <c10::DeviceType kDevice>
Tensor swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu) {
  const Lowered<kDevice> lower;
  return call_swiglu(lower(x), wg, wu, fg, fu);
}

template <c10::DeviceType kDevice>
Tensor swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                     const OptionalTensor& bias, Name format) {
  const Lowered<kDevice> lower;
  return call_swiglu_linear(lower(gate), lower(up), w, bias, format);
}

template <auto kCall, c10::DeviceType kDevice>
Tensor scaled(const Tensor& x, const Tensor& w, Name format, const OptionalTensor& c, double alpha,
              double beta, OptionalName strategy) {
  const Lowered<kDevice> lower;
  return kCall(lower(x), w, format, c, alpha, beta, strategy);
}

template <c10::DeviceType kDevice>
void register_all(torch::Library& m) {
  m.impl("linear", linear<kDevice>);
  m.impl("swiglu", swiglu<kDevice>);
  m.impl("swiglu_linear", swiglu_linear<kDevice>);
  m.impl("gemv", scaled<call_gemv, kDevice>);
  m.impl("gemm", scaled<call_gemm, kDevice>);
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, AutocastCPU, m) { register_all<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastMPS, m) { register_all<at::kMPS>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastCUDA, m) { register_all<at::kCUDA>(m); }

}  // namespace metalmm
