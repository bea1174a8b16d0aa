// gemm_small: y = x W^T for few rows of x; W is decoded into the registers of the matrix unit.
//
// Owner    A threadgroup owns 64 rows of W by 8 rows of x; a simdgroup 16 of those rows of W: two
//          8 x 8 matrices of f32 sums. K advances by 64 values, which 8 products of matrices cover:
//          column c of the W matrix and row c of the x matrix of product j are value 8 c + j. (A
//          sum over K may take any order: this costs nothing, and no lane needs another's values.)
//            W   a lane holds row r, columns 2 p and 2 p + 1: it decodes the 16 values from 16 p on
//            x   a lane holds row c, columns q and q + 1: it loads the 8 values from 8 c on, of two
//                rows of x
// Traffic  W is read M / 8 times, x once per simdgroup (from the cache, but for the first). Per 64
//          values of K a lane decodes 32 weights and loads 16 of x, for 16 multiplications.
// Cost     Per weight of q4_0 1.8 bitwise, 2 fma, 1.1 shifts and conversions and 0.5
//          multiplications of matrices (clang 22, f32 x).
// Needs    No threadgroup memory, no barrier. Operands are float: W and x are exact in every dtype.
#pragma once

#include "../tile/load.h"
#include "../tile/mma.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct GemmSmall {
  using Tile = GemmSmallTile;

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4*, Position at) {
    constexpr int kRows = Tile::kN / Tile::kSimdgroups;
    constexpr int kMatrices = kRows / kFragment;
    static_assert(Tile::kK == 64 && Tile::kM == kFragment, "16 values of a row of W a lane");

    const uint n = at.tg.y * Tile::kN + at.sg * kRows, m = at.tg.x * Tile::kM;
    const uint row = fragment_row(at.lane), column = fragment_column(at.lane);
    device const T* x0 = x_row(x, args, m + column);
    device const T* x1 = x_row(x, args, m + column + 1);
    typename Format::Row w_rows[kMatrices];
    MM_UNROLL
    for (int i = 0; i < kMatrices; ++i) {
      w_rows[i] = weight_row<Format>(weight, args, n + i * kFragment + row);
    }

    simdgroup_float8x8 acc[kMatrices][1];
    clear(acc);
    const KRange range = k_of_part(args, at.tg.z);
    for (uint k = range.begin; k < range.end; k += Tile::kK) {
      float xs[2][8];
      load_x(x0, k + 8 * row, range.end, xs[0]);
      load_x(x1, k + 8 * row, range.end, xs[1]);
      MM_UNROLL
      for (int i = 0; i < kMatrices; ++i) {
        float w[16];
        load_weights<Format>(w_rows[i], k + 8 * column, range.end, w);
        multiply(w, xs, acc[i][0]);
      }
    }
    store_tile(result, args, at, m, n, acc);
  }

 private:
  // acc += 8 rows of W * 8 rows of x over 64 values of K.
  static METAL_FUNC void multiply(thread const float (&w)[16], thread const float (&xs)[2][8],
                                  thread simdgroup_float8x8& acc) {
    MM_UNROLL
    for (int j = 0; j < 8; ++j) {
      simdgroup_float8x8 a, b;
      a.thread_elements()[0] = w[j];
      a.thread_elements()[1] = w[j + 8];
      b.thread_elements()[0] = xs[0][j];
      b.thread_elements()[1] = xs[1][j];
      simdgroup_multiply_accumulate(acc, a, b, acc);
    }
  }
};

}  // namespace metalmm
