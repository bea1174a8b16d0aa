// The ops of an engine that executes plans: arguments are checked, a Problem planned, its operands
// bound to slots. What remains for an engine is launch(Plan, Buffers).
//
// An engine is added in one file, which defines a function that returns its Engine and registers
// the ops for the dispatch key of its tensors (register.h):
//
//     const gpu::Engine& engine() { static const gpu::Engine e{gpu_of, launch}; return e; }
//     TORCH_LIBRARY_IMPL(metalmm, MPS, m) { gpu::register_engine<engine>(m); }
//
// launch enqueues the passes of a plan, in order, on the stream that torch uses for the device, and
// need not wait: torch's allocators give memory back to the same stream only. For each pass it sets
// the kernel, its function constants, `pass.threadgroup_bytes` of threadgroup memory (index 0),
// `pass.args` as bytes, and for every other bit of `pass.slots` the buffer that bound() names.
// Buffer::base is the data pointer of the tensor's storage: an address, on MPS an id<MTLBuffer>.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>

#include "ops/checks.h"
#include "ops/op_calls.h"
#include "plan/gpu.h"
#include "plan/plan.h"

namespace metalmm::gpu {

struct Engine {
  std::function<Gpu(c10::Device)> gpu;  // what plan() shall know of a device of this engine
  std::function<void(const Plan&, const Buffers&, c10::Device)> launch;
  // Where there is one: told of the memory of W before each plan that reads it.
  std::function<void(const c10::Storage&)> use_weight{};
};

// As ops/ops.def.
at::Tensor linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                  const OptionalTensor& bias, std::string_view format, OptionalName strategy,
                  const OptionalTensor& residual, OptionalName activations);
at::Tensor linear_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features);
at::Tensor norm_linear(const Engine& e, const at::Tensor& x, const OptionalTensor& norm_weight,
                       double eps, double offset, const at::Tensor& weight,
                       const OptionalTensor& bias, std::string_view format,
                       const OptionalTensor& residual, OptionalName activations);
at::Tensor swiglu(const Engine& e, const at::Tensor& x, const at::Tensor& gate_weight,
                  const at::Tensor& up_weight, std::string_view format_gate,
                  std::string_view format_up, std::string_view activation,
                  const OptionalTensor& norm_weight, std::optional<double> eps, double offset,
                  OptionalName activations);
at::Tensor swiglu_linear(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& weight, const OptionalTensor& bias,
                         std::string_view format, std::string_view activation,
                         const OptionalTensor& residual, OptionalName activations);
at::Tensor rms_norm(const Engine& e, const at::Tensor& x, const OptionalTensor& weight, double eps,
                    double offset, const OptionalTensor& residual);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const Engine& e, const at::Tensor& x,
                                                const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps,
                                                double offset);
Heads rope(const Engine& e, const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
           int64_t heads, int64_t kv_heads, const OptionalTensor& v, const OptionalTensor& q_norm,
           const OptionalTensor& k_norm, double eps, double offset, bool interleaved);
at::Tensor gemv(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy);
at::Tensor gemm(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy);
at::Tensor dequantize(const Engine& e, const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype);
// Ids on a device are not checked, which would wait for it: one below 0 gives the first row of the
// table, one beyond it the last.
at::Tensor embedding(const Engine& e, const at::Tensor& ids, const at::Tensor& weight,
                     std::string_view format, std::optional<int64_t> in_features,
                     std::optional<at::ScalarType> dtype);
// There is no shader that quantizes: w is copied to the CPU, quantized there, the result copied
// back.
at::Tensor quantize(const at::Tensor& w, std::string_view format, const OptionalTensor& importance);
at::Tensor probe(const Engine& e, const at::Tensor& x, const at::Tensor& x2, std::string_view op);

}  // namespace metalmm::gpu
