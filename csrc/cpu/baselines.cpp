// The GEMMs that make the gain of the others visible: plain loops over decoded rows, compiled for
// the baseline instruction set. Forced by name, never chosen.
#include <algorithm>
#include <vector>

#include "matmul.h"
#include "ops/tensors.h"
#include "parallel.h"

namespace metalmm::cpu {
namespace {

constexpr int64_t kTile = 32;        // rows of x and of W in a tile of gemm_tiled
constexpr int64_t kTileDepth = 256;  // values of K: two operands of 32 KB, the first-level cache

}  // namespace

// Decodes a row of W and multiplies it by every row of x, one product at a time.
void gemm_naive(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y) {
  const int64_t m = x.size(0), n = y.size(1), x_stride = x.stride(0);
  const float* from = elements<float>(x);
  float* out = y.mutable_data_ptr<float>();
  parallel_for(0, n, 1, [&](int64_t first, int64_t last) {
    std::vector<float> row(w.k);
    for (int64_t r = first; r < last; ++r) {
      decode(w, r, 0, w.k, row.data());
      for (int64_t i = 0; i < m; ++i) {
        float sum = 0;
        for (int64_t k = 0; k < w.k; ++k) sum += from[i * x_stride + k] * row[k];
        out[i * n + r] = sum;
      }
    }
  });
}

// gemm_naive in tiles that stay in the cache: W is decoded once for kTile rows of x, and
// transposed, so that the inner loop runs over rows of W.
void gemm_tiled(DecodeKernel decode, const Weight& w, const at::Tensor& x, at::Tensor y) {
  const int64_t m = x.size(0), n = y.size(1), x_stride = x.stride(0);
  const float* from = elements<float>(x);
  float* out = y.mutable_data_ptr<float>();
  const auto tile = [&](int64_t r0, int64_t m0, float* row, float* decoded) {
    const int64_t rows = std::min(kTile, n - r0), columns = std::min(kTile, m - m0);
    float acc[kTile][kTile] = {};  // [row of x][row of W]
    for (int64_t k0 = 0; k0 < w.k; k0 += kTileDepth) {
      const int64_t depth = std::min(kTileDepth, w.k - k0);
      for (int64_t r = 0; r < rows; ++r) {
        decode(w, r0 + r, k0, k0 + depth, row);
        for (int64_t k = 0; k < depth; ++k) decoded[k * kTile + r] = row[k];
      }
      for (int64_t i = 0; i < columns; ++i) {
        for (int64_t k = 0; k < depth; ++k) {
          const float value = from[(m0 + i) * x_stride + k0 + k];
          for (int64_t r = 0; r < kTile; ++r) acc[i][r] += value * decoded[k * kTile + r];
        }
      }
    }
    for (int64_t i = 0; i < columns; ++i) std::copy_n(acc[i], rows, out + (m0 + i) * n + r0);
  };
  parallel_for(0, ceil_div(n, kTile), 1, [&](int64_t first, int64_t last) {
    std::vector<float> row(kTileDepth), decoded(kTile * kTileDepth);
    for (int64_t t = first; t < last; ++t) {
      for (int64_t m0 = 0; m0 < m; m0 += kTile) tile(t * kTile, m0, row.data(), decoded.data());
    }
  });
}

}  // namespace metalmm::cpu
