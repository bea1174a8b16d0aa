// launch() on an NVIDIA GPU: the shaders as PTX, one file per kernel, which
// torch_metalmm/msl/ptx.py puts into the folder ptx/ beside this library.
#pragma once

#include "plan/launch.h"

namespace metalmm::cuda {

// Enqueues the passes on torch's stream of the device, which is the current one. The first use of a
// kernel with other function constants compiles it (50 ms; the driver keeps the result on disk),
// and its first grid that is larger than the GPU takes at once up to three times more. Throws
// std::runtime_error.
void launch(const BoundPlans& launches, int device);

}  // namespace metalmm::cuda
