// The soft cap of scores and of logits.
#pragma once

#include "../entry.h"

namespace metalmm {

// c tanh(s / c). tanh: below 0.625 an odd polynomial (Cephes tanhf), else 1 - 2 / (e^2x + 1), both
// within 2 ulp.
METAL_FUNC float soft_cap(float s, float c) {
  const float x = s / c, size = abs(x), z = x * x;
  float p = fma(-5.70498872745e-3f, z, 2.06390887954e-2f);
  p = fma(p, z, -5.37397155531e-2f);
  p = fma(p, z, 1.33314422036e-1f);
  p = fma(p, z, -3.33332819422e-1f);
  const float small = fma(p * z, x, x);
  const float large = copysign(1.0f - 2.0f / (exp(2.0f * (size > 20.0f ? 20.0f : size)) + 1.0f), x);
  return c * (size < 0.625f ? small : large);
}

}  // namespace metalmm
