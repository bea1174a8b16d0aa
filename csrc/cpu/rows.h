// Computations by row beside the matrix products: norms, the end of a product, the heads of
// attention. In f32; rows are shared among threads.
#pragma once

#include <vector>

#include "ops/checks.h"

namespace metalmm::cpu {

// rms_norm of ops.def of rows f32 [M, K], without its residual. A weight [R, K] has one of R rows
// by turns.
at::Tensor normalized(const at::Tensor& rows, const OptionalTensor& weight, double eps,
                      double offset);

// y + bias + residual, in the dtype and with the leading dimensions of x; y [M, N] f32, written, or
// of another dtype.
at::Tensor finish(at::Tensor y, const OptionalTensor& bias, const OptionalTensor& residual,
                  const at::Tensor& x);

// Heads of `dim` values, which lie side by side at each position: from `values`, positions
// position_stride apart in each of a batch, batch_stride apart.
struct HeadsFrom {
  const float* values;
  int64_t batch_stride, position_stride;
  int64_t batch, positions, count, dim;
};
// The extent of a norm: nothing, each head, or all heads of a position as one row.
enum class Normed { kNothing, kHead, kWhole };
// The rotation of heads: the first `rotated` values by cos and sin [positions, rotated], of a batch
// angle_stride apart. factors: of the norm, [dim] or [count dim], or null.
struct Turn {
  const float *cos, *sin;
  int64_t angle_stride, rotated;
  Normed normed;
  const float* factors;
  float eps;
  bool interleaved;
};
// to [batch, count, positions, dim], dense.
void turn_heads(const HeadsFrom& h, const Turn& t, float* to);

// The factors of a norm, f32 [K]; without a weight, none.
std::vector<float> norm_factors(const OptionalTensor& weight, double offset);

// Whether all n values are finite, as a quantizer requires.
bool all_finite(const float* x, int64_t n);

}  // namespace metalmm::cpu
