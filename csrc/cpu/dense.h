// y = x Wᵀ by torch's own matmul, in the dtype of x.
#pragma once

#include <ATen/ATen.h>

#include "plan/format.h"

namespace metalmm::cpu {

// Whether torch's matmul, W decoded for it, is faster than the kernels here for m rows of x: of
// bf16, on a machine that multiplies bf16.
bool dense_is_faster(int64_t m, at::ScalarType dtype);

// x [M, K], its last dimension dense -> [M, N], contiguous, of the dtype of x. W is rounded to it,
// and so is the product; torch's sums are f32.
at::Tensor dense(const at::Tensor& x, const at::Tensor& w, const Format& format);

}  // namespace metalmm::cpu
