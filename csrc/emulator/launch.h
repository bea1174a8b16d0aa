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

// Puts the emulator in the place of the CPU's kernels: the chip it plans for (0 cores: the chip's
// own), the order of its threads, and whether f32 and bf16 lose their subnormals. Throws c10::Error
// if it is installed, std::invalid_argument if there is no such chip.
void install_emulator(const std::string& chip, bool descending, uint32_t cores,
                      bool flush_subnormals);

// The CPU's kernels again.
void remove_emulator();

}  // namespace metalmm
