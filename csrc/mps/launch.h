// The Metal engine for plain C++: this process's device, and launch(Plan, Buffers) on it.
#pragma once

#include <string>

#include "facts.h"
#include "plan/launch.h"

namespace metalmm::mps {

// What the device reports. Throws std::runtime_error: torch has no MPS device here.
Facts facts();

// The machine to plan for. Throws std::runtime_error: as facts() and supported_gpu().
const Gpu& gpu();

// Encodes the passes into the current stream of torch.mps, in order, and returns before they ran. A
// buffer's base is an MTLBuffer. From any thread. Throws std::runtime_error as Pipelines::of does,
// before anything is encoded.
void launch(const Plan& plan, const Buffers& buffers);

// Where the library built ahead of time lies: beside this module, whether it is there or not.
std::string archive_path();

}  // namespace metalmm::mps
