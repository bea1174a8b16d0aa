// The Metal engine for plain C++: this process's device, and launch() on it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "facts.h"
#include "plan/launch.h"

namespace metalmm::mps {

// The facts of the device. Throws std::runtime_error: torch has no MPS device here.
Facts facts();

// The machine to plan for. Throws std::runtime_error: as facts() and supported_gpu().
const Gpu& gpu();

// Encodes the passes into the current stream of torch.mps, in order, in one block on its queue, and
// returns before they ran. A buffer's base is an MTLBuffer. From any thread. Throws
// std::runtime_error as Pipelines::of does, before anything is encoded.
void launch(const BoundPlans& launches);

// Compiles the kernel of a pass, unless it is. From any thread. Throws as Pipelines::of does.
void compile(const Pass& pass);

// A weight of torch's, as residency.h needs it.
struct WeakWeight {
  std::function<bool()> expired;
  std::function<std::shared_ptr<void>()> lock;
};

// Keeps the MTLBuffer of a weight resident while the weight lives and is in use (residency.h), on
// macOS 15 and newer. From any thread.
void keep_resident(const void* buffer, const std::function<WeakWeight()>& weight);

// The path of the library built ahead of time: beside this module, whether it is there or not.
std::string archive_path();

}  // namespace metalmm::mps
