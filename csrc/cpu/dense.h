// y = x Wᵀ by torch's own matmul, in the dtype of x.
#pragma once

#include "ops/aten.h"
#include "plan/format.h"

namespace metalmm::cpu {

// Whether torch's matmul, W decoded for it, is faster than gemm: for bf16 x, on a machine that
// multiplies bf16. Zen 4, one thread, time over that of gemm in f32, 4096 x 4096: M = 25 0.61
// (q4_0) and 0.69 (q4_k), M = 512 0.48 and 0.49; over gemv_batched at M = 24 0.79 and 0.89, at M =
// 16 1.03 and 1.14. f32 x would take 1.1 of gemm's time.
bool dense_is_faster(at::ScalarType dtype);

// x [M, K], its last dimension dense -> [M, N], contiguous, of the dtype of x. W is rounded to it,
// and so is the product; torch's sums are f32.
at::Tensor dense(const at::Tensor& x, const at::Tensor& w, const Format& format);

}  // namespace metalmm::cpu
