// The functions that the core asks of the ops. The core is linked against neither torch nor Python;
// the ops are a module per torch minor, which is loaded after the core, and hands its functions
// over as it is loaded.
#pragma once

#include <cstdint>
#include <functional>

#include "plan/plan.h"

namespace metalmm {

namespace mps {
struct Facts;
}

// launch() of an engine whose tensors are the CPU's.
using HostLaunch = std::function<void(const BoundPlans&)>;

struct Hooks {
  // The strategy that the CPU takes on this machine of linear for m rows of x.
  const char* (*cpu_strategy)(int64_t m, DType dtype) = nullptr;
  // Puts an engine in the place of the CPU's kernels, and these again.
  void (*replace_cpu)(const Gpu& gpu, HostLaunch launch) = nullptr;
  void (*restore_cpu)() = nullptr;
  // The facts of the Metal device: mps/launch.h. On macOS.
  void (*mps_facts)(mps::Facts* out) = nullptr;
  void (*mps_compile)(const Pass& pass) = nullptr;
};

// For a module of ops to fill in.
Hooks& hooks();

// The hooks, all of them handed over. Throws std::runtime_error: no ops are loaded.
const Hooks& loaded_hooks();

// Puts an engine in the place of the CPU's kernels: `who`, one at a time. Throws
// std::runtime_error: another is there, or no ops are loaded.
void stand_in(const char* who, const Gpu& gpu, HostLaunch launch);
// The CPU's kernels again. Throws std::runtime_error: `who` does not stand in.
void step_back(const char* who);

}  // namespace metalmm
