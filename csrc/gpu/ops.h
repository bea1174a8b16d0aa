// The ops of an engine that executes plans: arguments are checked, a Problem planned, its operands
// bound to slots. An engine adds launch(Plan, Buffers).
//
// An engine is added in one file, which defines a function that returns its Engine and registers
// the ops for the dispatch key of its tensors (register.h):
//
//     const gpu::Engine& engine() { static const gpu::Engine e{gpu_of, launch}; return e; }
//     TORCH_LIBRARY_IMPL(metalmm, MPS, m) { gpu::register_engine<engine>(m); }
//
// launch enqueues the passes of plans, in order, on the stream that torch uses for the device, and
// need not wait: torch's allocators give memory back to the same stream only. For each pass it sets
// the kernel, its function constants, `pass.threadgroup_bytes` of threadgroup memory (index 0),
// `pass.args` as bytes, and for every other bit of `pass.slots` the buffer that bound() names.
// Buffer::base is the data pointer of the tensor's storage: an address, on MPS an id<MTLBuffer>.
#pragma once

#include <functional>

#include "ops/checks.h"
#include "ops/replay/launched.h"
#include "plan/gpu.h"
#include "plan/plan.h"

namespace metalmm::gpu {

struct Engine {
  std::function<Gpu(c10::Device)> gpu;  // a device of this engine as plan() shall know it
  replay::Launcher launch;
  // A function, or none, that is told of the memory of W before each plan that reads it.
  std::function<void(const c10::Storage&)> use_weight{};
};

// The ops, each as its row of ops/ops.def.
#define MM_OP(name, results, arguments) \
  result::results::Type name(const Engine& e, const args::name& a);
#define MM_HOST_OP(name, results, arguments) result::results::Type name(const args::name& a);
#include "ops/ops.def"

}  // namespace metalmm::gpu
