// Functions that an Apple GPU computes by one instruction of its own, from OpenCL's native ones.
#pragma once

#include "library/math.h"
#include "runtime.h"

namespace metal {

METAL_FUNC float exp(float x) { return native_exp2(x * 1.44269504f); }
METAL_FUNC float exp2(float x) { return native_exp2(x); }
METAL_FUNC float log(float x) { return native_log2(x) * 0.693147181f; }
METAL_FUNC float log2(float x) { return native_log2(x); }
METAL_FUNC float rsqrt(float x) { return native_rsqrt(x); }
METAL_FUNC float sqrt(float x) { return native_sqrt(x); }
// 1 - 2 / (e^2x + 1).
METAL_FUNC float tanh(float x) { return 1.0f - 2.0f / (native_exp2(x * 2.88539008f) + 1.0f); }

}  // namespace metal
