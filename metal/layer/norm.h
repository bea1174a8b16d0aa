// RMS norm in f32: x * rsqrt(mean of x^2 + eps) * (offset + weight).
#pragma once

#include "../entry.h"

namespace metalmm {

// The factor of a value for its weight.
METAL_FUNC float norm_factor(float weight, float offset) {
  return norm_has_offset() ? offset + weight : weight;
}

// The factor of a row of fc_k values whose squares sum to `squares`.
METAL_FUNC float norm_scale(float squares, float eps) { return rsqrt(squares / float(fc_k) + eps); }

// squares + the sum of the squares of v, which is added first: chains stay short.
template <int kCount>
METAL_FUNC float add_squares(thread const float (&v)[kCount], float squares) {
  float sum = v[0] * v[0];
  MM_UNROLL
  for (int i = 1; i < kCount; ++i) sum = fma(v[i], v[i], sum);
  return squares + sum;
}

}  // namespace metalmm
