// The schemas of torch.ops.metalmm. Each engine registers its kernels for its own dispatch key.
#include <torch/library.h>

TORCH_LIBRARY(metalmm, m) {
  // y = x Wᵀ + bias
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, str format, str? strategy=None) -> Tensor");
  // grad W: the gradient of linear with respect to x; grad [..., N] -> [..., K], in the dtype of
  // grad
  m.def("linear_input_grad(Tensor grad, Tensor weight, str format, int in_features) -> Tensor");
  // silu(x Gᵀ) * (x Uᵀ)
  m.def(
      "swiglu(Tensor x, Tensor gate_weight, Tensor up_weight, str format_gate, str format_up) -> "
      "Tensor");
  // (silu(gate) * up) Wᵀ + bias
  m.def("swiglu_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias, str format) -> Tensor");
  // alpha W x + beta c;  x [K], c [N]
  m.def(
      "gemv(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float beta=0, "
      "str? strategy=None) -> Tensor");
  // alpha x Wᵀ + beta c;  x [M, K], c [M, N]
  m.def(
      "gemm(Tensor x, Tensor weight, str format, Tensor? c=None, float alpha=1, float beta=0, "
      "str? strategy=None) -> Tensor");
  m.def(
      "dequantize(Tensor weight, str format, int? in_features=None, *, ScalarType? dtype=None) -> "
      "Tensor");
  m.def("quantize(Tensor w, str format) -> Tensor");
  // ids [...] -> [..., K]. An id outside the table is an IndexError on the CPU; on a device, where
  // a check would wait, it gives the nearest row.
  m.def(
      "embedding(Tensor ids, Tensor weight, str format, int? in_features=None, *, "
      "ScalarType? dtype=None) -> Tensor");
  // x op x2 for add, sub, mul, div; the dot product for dot, of shape []. Probes of an engine, for
  // bench and tests: no gradient.
  m.def("probe(Tensor x, Tensor x2, str op) -> Tensor");
}
