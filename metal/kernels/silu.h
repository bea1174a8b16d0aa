// silu(x) = x / (1 + exp(-x)), and the product that a SwiGLU layer makes of it.
#pragma once

#include "../entry.h"

namespace metalmm {

METAL_FUNC float silu(float x) { return x / (1.0f + exp(-x)); }

struct SiluMul {
  static METAL_FUNC float of(float gate, float up) { return silu(gate) * up; }
};

}  // namespace metalmm
