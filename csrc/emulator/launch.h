// launch() on the emulator.
#pragma once

#include <functional>
#include <string>

#include "library.h"
#include "plan/launch.h"

namespace metalmm {

// Makes the kernels of a library launchable, in place of kernels of the same name. Throws as
// ShaderLibrary.
void load_emulated(const std::string& path);
// From here on `load` is called for a kernel that no library has, to load_emulated() one that does.
// The libraries so far are forgotten.
void set_load_kernel(std::function<void(const std::string& kernel)> load);

// Runs the passes in order. Throws std::runtime_error with the message of a fault.
void launch_emulated(const BoundPlans& launches, const EmulatorOptions& options = {});

// Puts the emulator in the place of the CPU's kernels: the chip it plans for (0 cores: the chip's
// own), the order of its threads, and whether f32 and bf16 lose their subnormals. Whether it keeps
// those of f16, as it is planned for. Throws std::invalid_argument: no such chip;
// std::runtime_error: as stand_in().
bool install_emulator(const std::string& chip, bool descending, uint32_t cores,
                      bool flush_subnormals);

// The CPU's kernels again. Throws std::runtime_error: it is not installed.
void remove_emulator();

}  // namespace metalmm
