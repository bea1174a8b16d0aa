// What an engine launches for an op, which a replayed step launches again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/launch.h"

namespace metalmm::replay {

// launch() of an engine, which lives as long as the process.
using Launcher = std::function<void(const BoundPlans&, c10::Device)>;

// An engine takes the place of another, whose launches are not replayed from here on.
void change_engine();
uint64_t engine_changes();

// Memory [bytes] of `options` that one launch alone reads and writes. Of a step that is recorded
// all launches have the same, as they run in order.
at::Tensor scratch(int64_t bytes, at::TensorOptions options);

// Launches, and notes it where a step is recorded on this thread. `memory`: what the buffers are
// parts of, which the recording keeps.
void launch(const Launcher& launcher, BoundPlan launch, c10::Device device,
            std::vector<at::Tensor> memory);

}  // namespace metalmm::replay
