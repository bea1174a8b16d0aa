// The ops of an engine under the dispatch key of its tensors. ops.h says how one is added.
#pragma once

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "ops.h"

namespace metalmm::gpu {

// kOp without its first argument, which is engine().
template <auto kOp, const Engine& (*engine)()>
struct OpOf;
template <class... Args, at::Tensor (*kOp)(const Engine&, Args...), const Engine& (*engine)()>
struct OpOf<kOp, engine> {
  static at::Tensor call(Args... args) { return kOp(engine(), args...); }
};

// Every op of ops/schemas.cpp. The library has a dispatch key: TORCH_LIBRARY_IMPL(metalmm, MPS, m).
template <const Engine& (*engine)()>
void register_engine(torch::Library& m) {
  m.impl("linear", OpOf<&linear, engine>::call);
  m.impl("linear_input_grad", OpOf<&linear_input_grad, engine>::call);
  m.impl("swiglu", OpOf<&swiglu, engine>::call);
  m.impl("swiglu_linear", OpOf<&swiglu_linear, engine>::call);
  m.impl("gemv", OpOf<&gemv, engine>::call);
  m.impl("gemm", OpOf<&gemm, engine>::call);
  m.impl("dequantize", OpOf<&dequantize, engine>::call);
  m.impl("quantize", OpOf<&quantize, engine>::call);
  m.impl("embedding", OpOf<&embedding, engine>::call);
  m.impl("probe", OpOf<&probe, engine>::call);
}

// While the result lives, the engine computes on CPU tensors in the place of the CPU's kernels.
template <const Engine& (*engine)()>
torch::Library in_place_of_cpu() {
  // torch warns that kernels are replaced, which is the point.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  torch::Library m(torch::Library::IMPL, "metalmm", c10::DispatchKey::CPU, __FILE__, __LINE__);
  register_engine<engine>(m);
  return m;
}

}  // namespace metalmm::gpu
