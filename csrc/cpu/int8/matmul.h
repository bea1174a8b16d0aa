// y = x Wᵀ on the CPU with x rounded to int8 or int16: the three ways to walk it, as those of
// cpu/matmul.h.
//
// gemv          up to kMaxGemvCodes rows of codes share one decoding of W, into registers
// gemv_batched  a few more share one into the first-level cache
// gemm          W is decoded into the second-level cache and multiplied in register tiles
// A strategy gives a row of x the same bits whatever the other rows are.
#pragma once

#include "cpu/int8/kernels.h"
#include "cpu/matmul.h"

namespace metalmm::cpu::int8 {

// int8 products have the first three of kStrategyNames.
constexpr int kNumStrategies = static_cast<int>(Strategy::kGemm) + 1;

// y f32 [M, N], contiguous, of x f32 [M, K], its last dimension dense. None of M, N and K is 0, and
// the format has integer codes.
void matmul(const Weight& w, const Format& format, Activations activations,
            std::optional<Strategy> strategy, const at::Tensor& x, at::Tensor& y);

// row_products() of cpu/matmul.h, for a format that has integer codes.
void row_products(const RowProducts& products, int64_t n, const Weight& like, const Format& format,
                  Activations activations);

}  // namespace metalmm::cpu::int8
