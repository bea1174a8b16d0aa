// torch.ops.metalmm_emulator: the ops on CPU tensors, computed by the shaders on the emulator.
// torch_metalmm.testing builds the shaders and can put these in the place of torch.ops.metalmm.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "../gpu_ops.h"
#include "launch.h"

namespace metalmm {
namespace {

using gpu::OptionalName;
using gpu::OptionalTensor;

EmulatorOptions g_options;

gpu::Engine& engine() {
  static gpu::Engine e{gpu_by_name("m1"), [](const Plan& plan, const Buffers& buffers) {
                         launch_emulated(plan, buffers, g_options);
                       }};
  return e;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias,
                  std::string_view format, OptionalName strategy) {
  return gpu::linear(engine(), x, w, bias, format, strategy);
}
at::Tensor linear_input_grad(const at::Tensor& grad, const at::Tensor& w, std::string_view format,
                             int64_t in_features) {
  return gpu::linear_input_grad(engine(), grad, w, format, in_features);
}
at::Tensor swiglu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
                  std::string_view format_gate, std::string_view format_up) {
  return gpu::swiglu(engine(), x, gate, up, format_gate, format_up);
}
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& w,
                         const OptionalTensor& bias, std::string_view format) {
  return gpu::swiglu_linear(engine(), gate, up, w, bias, format);
}
at::Tensor gemv(const at::Tensor& x, const at::Tensor& w, std::string_view format,
                const OptionalTensor& c, double alpha, double beta, OptionalName strategy) {
  return gpu::scaled_matmul(engine(), x, w, format, c, alpha, beta, strategy, 1);
}
at::Tensor gemm(const at::Tensor& x, const at::Tensor& w, std::string_view format,
                const OptionalTensor& c, double alpha, double beta, OptionalName strategy) {
  return gpu::scaled_matmul(engine(), x, w, format, c, alpha, beta, strategy, 2);
}
at::Tensor dequantize(const at::Tensor& w, std::string_view format, std::optional<int64_t> k,
                      std::optional<at::ScalarType> dtype) {
  return gpu::dequantize(engine(), w, format, k, dtype);
}
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& w, std::string_view format,
                     std::optional<int64_t> k, std::optional<at::ScalarType> dtype) {
  return gpu::embedding(engine(), ids, w, format, k, dtype);
}

}  // namespace

TORCH_LIBRARY(metalmm_emulator, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, str format, str? strategy=None) -> Tensor",
        linear);
  m.def("linear_input_grad(Tensor grad, Tensor weight, str format, int in_features) -> Tensor",
        linear_input_grad);
  m.def(
      "swiglu(Tensor x, Tensor gate_weight, Tensor up_weight, str format_gate, str format_up) -> "
      "Tensor",
      swiglu);
  m.def("swiglu_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias, str format) -> Tensor",
        swiglu_linear);
  m.def(
      "gemv(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float beta=0, "
      "str? strategy=None) -> Tensor",
      gemv);
  m.def(
      "gemm(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float beta=0, "
      "str? strategy=None) -> Tensor",
      gemm);
  m.def(
      "dequantize(Tensor weight, str format, int? in_features=None, *, ScalarType? dtype=None) -> "
      "Tensor",
      dequantize);
  m.def(
      "embedding(Tensor ids, Tensor weight, str format, int? in_features=None, *, "
      "ScalarType? dtype=None) -> Tensor",
      embedding);
}

void bind_emulator(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("load_emulated", load_emulated, py::arg("path"),
        "Makes the kernels of a library that torch_metalmm.testing built launchable.");
  m.def(
      "set_emulator",
      [](const std::string& chip, bool descending, uint32_t cores) {
        engine().gpu = gpu_by_name(chip);
        if (cores) engine().gpu.cores = cores;
        g_options.descending = descending;
      },
      py::arg("chip") = "m1", py::arg("descending") = false, py::arg("cores") = 0,
      "The chip that torch.ops.metalmm_emulator plans for, and the order of its threads.");
}

}  // namespace metalmm
