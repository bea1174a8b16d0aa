// y = x Wᵀ on the CPU, in f32: the ways to walk it, and which is taken.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>

#include "kernels.h"

namespace metalmm::cpu {

// gemv          each row of x on its own: W is decoded M times
// gemv_steps    up to kMaxStepRows rows of x share one decoding, in an order that is not K's where
// the
//               format has one (StepKernels): the sums are other ones than those of gemv
// gemv_batched  up to kMaxDotRows rows of x share one decoding of W, in registers
// gemm          W is decoded into the cache, block by block, and multiplied in register tiles
// gemm_tiled, gemm_naive: baselines.cpp
enum class Strategy { kGemv, kGemvSteps, kGemvBatched, kGemm, kGemmTiled, kGemmNaive };

constexpr const char* kStrategyNames[] = {"gemv", "gemv_steps", "gemv_batched",
                                          "gemm", "gemm_tiled", "gemm_naive"};  // in this order

// Throws std::invalid_argument that lists the CPU's strategies.
Strategy strategy_by_name(std::string_view name);

// The fastest for m rows of x.
Strategy choose_strategy(int64_t m);

// The kernels of a format for the instruction set in use.
inline const CodecKernels& kernels_of(const Format& format) {
  return current_isa().codec[static_cast<int>(format.codec)];
}

// A packed weight [N, row_bytes] as the kernels take it. `w` must outlive the result.
Weight make_weight(const at::Tensor& w, const Format& format, int64_t k);

// Interleaves m rows of x by vectors, for the dot kernel of `rows` >= m rows.
void interleave(const float* x, int64_t x_stride, int64_t m, int64_t k, int64_t rows, int width,
                float* out);

// x f32 [M, K], its last dimension dense -> f32 [M, N], contiguous.
at::Tensor matmul(const at::Tensor& x, const at::Tensor& w, const Format& format,
                  std::optional<Strategy> strategy);

// y [M, N] = x [M, K] Wᵀ without tuned kernels; x and y as matmul() has them.
void gemm_naive(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y);
void gemm_tiled(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y);

// Rows [first, last) of W as f32 [last - first, K].
at::Tensor decode_rows(const at::Tensor& w, const Format& format, int64_t k, int64_t first,
                       int64_t last);

}  // namespace metalmm::cpu
