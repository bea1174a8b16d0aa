// Math functions that LLVM has no instructions for on NVIDIA GPUs.
#pragma once

#include "library/math.h"

namespace metal {

// x = n ln 2 + r, 2^n (1 + r + r^2 p(r)): a relative error below 1.6 * 2^-24, a subnormal result
// within 0.75 ulp. The scale comes in two factors: a result that is too large becomes infinite.
METAL_FUNC float exp(float x) {
  const float inside = clamp(x, -105.0f, 89.0f);
  const float n = rint(inside * 1.44269504f);
  const float r = fma(n, -1.42860677e-6f, fma(n, -0.693145752f, inside));
  float p = fma(0.00139337f, r, 0.00836324f);
  p = fma(p, r, 0.04166646f);
  p = fma(p, r, 0.16666577f);
  p = fma(p, r, 0.5f);
  p = 1.0f + fma(p, r * r, r);
  const int whole = static_cast<int>(n), first = whole / 2;
  p *= as_type<float>((first + 127) << 23);
  return x != x ? x : p * as_type<float>((whole - first + 127) << 23);
}

}  // namespace metal
