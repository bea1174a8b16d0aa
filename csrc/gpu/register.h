// The ops of an engine under the dispatch key of its tensors. ops.h says how one is added.
#pragma once

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "ops.h"
#include "ops/strategies.h"

namespace metalmm::gpu {

// kOp without its first argument, which is engine().
template <auto kOp, const Engine& (*engine)()>
struct OnEngine;
template <class R, class Args, R (*kOp)(const Engine&, const Args&), const Engine& (*engine)()>
struct OnEngine<kOp, engine> {
  static R run(const Args& a) { return kOp(engine(), a); }
};

// The ops of ops/ops.def that shaders compute. The library has a dispatch key:
// TORCH_LIBRARY_IMPL(metalmm, MPS, m).
template <const Engine& (*engine)()>
void register_shaders(torch::Library& m) {
#define MM_HOST_OP(name, ...)
#define MM_OP(name, ...) \
  implement<args::name>(m, Kernel<args::name, &OnEngine<&name, engine>::run>::run);
#include "ops/ops.def"
}

// Every op, for tensors of another device than the CPU.
template <const Engine& (*engine)()>
void register_engine(torch::Library& m) {
  register_shaders<engine>(m);
#define MM_HOST_OP(name, ...) implement<args::name>(m, Kernel<args::name, &name>::run);
#define MM_FORWARD_OP(name, ...)
#define MM_OP(name, ...)
#include "ops/ops.def"
}

// While it lives, the engine computes on CPU tensors in the place of the CPU's kernels, but for
// quantize, and takes the strategies of plan().
template <const Engine& (*engine)()>
class InPlaceOfCpu {
 public:
  InPlaceOfCpu() {
    // torch warns that kernels are replaced, which is the point.
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } handler;
    const c10::WarningUtils::WarningHandlerGuard guard(&handler);
    register_shaders<engine>(library_);
  }
  ~InPlaceOfCpu() { set_strategy_check(at::kCPU, before_); }
  InPlaceOfCpu(const InPlaceOfCpu&) = delete;
  InPlaceOfCpu& operator=(const InPlaceOfCpu&) = delete;

 private:
  torch::Library library_{torch::Library::IMPL, "metalmm", c10::DispatchKey::CPU, __FILE__,
                          __LINE__};
  StrategyCheck before_ = set_strategy_check(at::kCPU, nullptr);
};

}  // namespace metalmm::gpu
