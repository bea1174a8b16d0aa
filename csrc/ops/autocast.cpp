// Under torch.autocast a matmul takes its activations in the autocast dtype. Weights are packed;
// bias, residual and c are added in f32 whatever their dtype. Norms and rope keep the dtype they
// are given.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "attention/calls.h"
#include "experts/calls.h"
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
              OptionalName strategy, const OptionalTensor& residual, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_linear(lower(x), w, bias, format, strategy, residual, activations);
}

template <c10::DeviceType kDevice>
Tensor norm_linear(const Tensor& x, const OptionalTensor& norm_weight, double eps, double offset,
                   const Tensor& w, const OptionalTensor& bias, Name format,
                   const OptionalTensor& residual, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_norm_linear(lower(x), norm_weight, eps, offset, w, bias, format, residual,
                          activations);
}

template <c10::DeviceType kDevice>
Tensor swiglu(const Tensor& x, const Tensor& wg, const Tensor& wu, Name fg, Name fu,
              Name activation, const OptionalTensor& norm_weight, std::optional<double> eps,
              double offset, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_swiglu(lower(x), wg, wu, fg, fu, activation, norm_weight, eps, offset, activations);
}

template <c10::DeviceType kDevice>
Tensor swiglu_linear(const Tensor& gate, const Tensor& up, const Tensor& w,
                     const OptionalTensor& bias, Name format, Name activation,
                     const OptionalTensor& residual, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_swiglu_linear(lower(gate), lower(up), w, bias, format, activation, residual,
                            activations);
}

// The cache keeps its format, and scores are f32.
template <c10::DeviceType kDevice>
Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, Name format_k,
                 Name format_v, const OptionalTensor& length, const OptionalTensor& mask,
                 std::optional<double> scale, double softcap, int64_t window,
                 const OptionalTensor& sinks, bool causal, OptionalName strategy) {
  const Lowered<kDevice> lower;
  return call_attention(lower(q), keys, values, format_k, format_v, length,
                        {mask, scale, softcap, window, sinks, causal, strategy});
}

// Scores are multiplied in f32, whatever their dtype.
template <c10::DeviceType kDevice>
Tensor expert_linear(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, const OptionalTensor& scores,
                     OptionalName strategy, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_expert_linear(lower(x), w, ids, bias, format, scores, strategy, activations);
}

template <c10::DeviceType kDevice>
Tensor expert_swiglu(const Tensor& x, const Tensor& w, const Tensor& ids,
                     const OptionalTensor& bias, Name format, Name activation, bool interleaved,
                     const OptionalTensor& up_weight, std::optional<double> limit, double alpha,
                     OptionalName strategy, OptionalName activations) {
  const Lowered<kDevice> lower;
  return call_expert_swiglu(lower(x), w, ids, bias, format,
                            {activation, interleaved, up_weight, limit, alpha}, strategy,
                            activations);
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
  m.impl("norm_linear", norm_linear<kDevice>);
  m.impl("swiglu", swiglu<kDevice>);
  m.impl("swiglu_linear", swiglu_linear<kDevice>);
  m.impl("attention", attention<kDevice>);
  m.impl("expert_linear", expert_linear<kDevice>);
  m.impl("expert_swiglu", expert_swiglu<kDevice>);
  m.impl("gemv", scaled<call_gemv, kDevice>);
  m.impl("gemm", scaled<call_gemm, kDevice>);
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, AutocastCPU, m) { register_all<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastMPS, m) { register_all<at::kMPS>(m); }
TORCH_LIBRARY_IMPL(metalmm, AutocastCUDA, m) { register_all<at::kCUDA>(m); }

}  // namespace metalmm
