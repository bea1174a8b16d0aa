// y = x Wᵀ on the CPU: the ways to walk it, and which is taken.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "ops/aten.h"
#include "ops/strategies.h"

namespace metalmm::cpu {

// gemv          each row of x on its own: W is decoded M times
// gemv_steps    up to kMaxStepRows rows of x share one decoding, where the format has one that is
//               not in the order of K (StepKernels): the sums are other ones than those of gemv
// gemv_batched  up to kMaxDotRows rows of x share one decoding of W, in registers
// gemm          W is decoded into the cache, block by block, and multiplied in register tiles
// dense         W is decoded in x's dtype, and torch's own matmul multiplies: dense.h
// gemm_tiled, gemm_naive: baselines.cpp
enum class Strategy { kGemv, kGemvBatched, kGemm, kGemvSteps, kDense, kGemmTiled, kGemmNaive };

// In this order; those that take rounded activations are first.
constexpr const char* kStrategyNames[] = {"gemv",  "gemv_batched", "gemm",      "gemv_steps",
                                          "dense", "gemm_tiled",   "gemm_naive"};

// Throws std::invalid_argument that lists the CPU's strategies for such activations.
Strategy strategy_by_name(std::string_view name, Activations activations);

// The fastest for m rows of x of this dtype.
Strategy choose_strategy(int64_t m, at::ScalarType dtype);

// The kernels of a format for the instruction set in use.
inline const CodecKernels& kernels_of(const Format& format) {
  return current_isa().of(format.codec);
}

// A packed weight [N, row_bytes] as the kernels take it. `w` must outlive the result.
Weight make_weight(const at::Tensor& w, const Format& format, int64_t k);

// Interleaves m rows of x by vectors, for the dot kernel of `rows` >= m rows.
void interleave(const float* x, int64_t x_stride, int64_t m, int64_t k, int64_t rows, int width,
                float* out);

// rows [M, K], f32 or of x's dtype, their last dimension dense -> [M, N], contiguous: f32, or of
// dense, which rounds rows and product to it, of x's dtype. Without a strategy the chosen one.
at::Tensor matmul(const at::Tensor& rows, const at::Tensor& w, const Format& format,
                  at::ScalarType x_dtype, std::optional<Strategy> strategy = std::nullopt,
                  Activations activations = Activations::kExact);

// Products of rows [1, K], f32, with matrices of packed rows.
struct RowProducts {
  struct Product {
    size_t x;  // index of its row
    const uint8_t* w;
    float* y;  // [N]
  };
  std::vector<at::Tensor> x;
  std::vector<Product> of;
};

// Products with matrices of the format and size of `like`, each with the bits of matmul(), in one
// loop over the threads for all of them. N and K are not 0.
void row_products(const RowProducts& products, int64_t n, const Weight& like, const Format& format,
                  Activations activations);

// y [M, N] = x [M, K] Wᵀ without tuned kernels, in f32; x as matmul() has rows.
void gemm_naive(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y);
void gemm_tiled(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y);

// Rows [first, last) of W as f32 [last - first, K].
at::Tensor decode_rows(const at::Tensor& w, const Format& format, int64_t k, int64_t first,
                       int64_t last);

}  // namespace metalmm::cpu
