// launch(Plan, Buffers) on the emulator: compiled shaders are libraries that testing.py builds.
#pragma once

#include <string>

#include "../launch.h"

namespace metalmm {

struct EmulatorOptions {
  bool descending = false;  // the last simdgroup and lane first
  uint32_t workers = 0;     // OS threads; 0: one per core
};

// Makes the kernels of a library launchable, in place of kernels of the same name. Throws
// std::runtime_error.
void load_emulated(const std::string& path);

// Runs the passes in order. Throws std::runtime_error that says what the emulator found, in which
// kernel and where, as "file:line" or "library+0xaddress".
void launch_emulated(const Plan& plan, const Buffers& buffers, const EmulatorOptions& options = {});

}  // namespace metalmm
