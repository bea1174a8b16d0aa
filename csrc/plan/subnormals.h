// Whether a GPU keeps subnormal halves, by a product whose codes are such (metal/formats/piece.h).
#pragma once

#include <functional>

#include "gpu.h"
#include "launch.h"

namespace metalmm {

// The product, of a GPU that keeps them.
constexpr float kKeptProduct = -264.0f;

// run: launches on operands in the host's memory, and waits for y. One that throws keeps none.
bool keeps_subnormals(Gpu gpu, const std::function<void(const BoundPlans&)>& run);

}  // namespace metalmm
