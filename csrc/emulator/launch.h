// launch(Plan, Buffers) on the emulator: compiled shaders are libraries that testing.py builds.
#pragma once

#include <functional>
#include <string>

#include "plan/launch.h"

namespace metalmm {

struct EmulatorOptions {
  bool descending = false;        // the last simdgroup and lane first
  bool flush_subnormals = false;  // of f32 and bf16
  uint32_t workers = 0;           // OS threads; 0: one per core
  uint32_t seconds = 300;         // after which a kernel is an endless loop; 0: never
};

// "file:line" of an address of a library, or nothing: from its debug information, which Python
// reads.
using LineOf = std::function<std::string(const std::string& library, uint64_t address)>;
void set_line_of(LineOf line_of);

// Makes the kernels of a library launchable, in place of kernels of the same name. Throws
// std::runtime_error.
void load_emulated(const std::string& path);

// Runs the passes in order. Throws std::runtime_error that says what the emulator found, in which
// kernel and where, as "file:line", or "library+0xaddress" without a LineOf.
void launch_emulated(const Plan& plan, const Buffers& buffers, const EmulatorOptions& options = {});

// Whether the emulator computes on CPU tensors in the place of the CPU's kernels.
bool emulator_is_installed();

}  // namespace metalmm
