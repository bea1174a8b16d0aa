// gemm_small: y = x W^T for few rows of x; W is decoded into the registers of the matrix unit.
//
// Owner    A threadgroup owns 64 rows of W by fc_batch rows of x, 8 or 16; a simdgroup 16 of those
//          rows of W: two 8 x 8 matrices of f32 sums for 8 rows of x. K advances by 128 values,
//          which 16 products of matrices cover: column c of the W matrix and row c of the x matrix
//          of product j are value 16 c + j. (A sum over K may take any order: this costs nothing,
//          and no lane needs another's values.)
//            W   a lane holds row r, columns 2 p and 2 p + 1: it decodes the 32 values from 32 p on
//            x   a lane holds row c, columns q and q + 1: it loads the 16 values from 16 c on, of
//                two rows of x
// Traffic  W is read M / fc_batch times, x once per simdgroup (from the cache, but for the first).
//          Per 128 values of K a lane decodes 64 weights and loads 32 of x for 8 rows of x, for 32
//          products.
// Cost     Per weight of q4_0 1.8 bitwise, 2 fma, 1.1 shifts and conversions and 0.5
//          multiplications of matrices (clang 22, f32 x, 8 rows).
// Needs    No threadgroup memory, no barrier. Operands are those of gemm: half for f16 x, which
//          rounds W to 11 bits; float for f32 and bf16 x.
#pragma once

#include "../tile/load.h"
#include "../tile/mma.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct GemmSmall {
  using Tile = GemmSmallTile;
  using E = typename TileOperand<T>::type;
  using XRow = device const T*;

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4*, Position at) {
    constexpr int kRows = Tile::kN / Tile::kSimdgroups;
    constexpr int kMatrices = kRows / kFragment, kBatches = Tile::kM / kFragment;
    static_assert(Tile::kK == kFragment * kProducts, "16 values of a row of x a lane");

    const uint n = at.tg.y * Tile::kN + at.sg * kRows, m = at.tg.x * fc_batch;
    const uint row = fragment_row(at.lane), column = fragment_column(at.lane);
    XRow x_rows[kBatches][2];
    MM_UNROLL
    for (int b = 0; b < kBatches; ++b) {
      x_rows[b][0] = x_row(x, args, m + b * kFragment + column);
      x_rows[b][1] = x_row(x, args, m + b * kFragment + column + 1);
    }
    typename Format::Row w_rows[kMatrices];
    MM_UNROLL
    for (int i = 0; i < kMatrices; ++i) {
      w_rows[i] = weight_row<Format>(weight, args, n + i * kFragment + row);
    }

    simdgroup_float8x8 acc[kBatches][kMatrices][1];
    MM_UNROLL
    for (int b = 0; b < kBatches; ++b) clear(acc[b]);
    const KRange range = k_of_part(args, at.tg.z);
    for (uint k = range.begin; k < range.end; k += Tile::kK) {
      E xs[kBatches][2][kProducts];
      MM_UNROLL
      for (uint b = 0; b < kBatches; ++b) {
        if (is_used(b)) load_two(x_rows[b], k + kProducts * row, range.end, xs[b]);
      }
      // A multiple of 32, visibly: both halves of a block are then read once.
      const uint first = (k + kProducts * column) / kChunkValues * kChunkValues;
      MM_UNROLL
      for (int i = 0; i < kMatrices; ++i) {
        float w[2][kProducts];
        load_weights<Format>(w_rows[i], first, range.end, w[0]);
        load_weights<Format>(w_rows[i], first + kProducts, range.end, w[1]);
        MM_UNROLL
        for (uint b = 0; b < kBatches; ++b) {
          if (is_used(b)) multiply(w, xs[b], acc[b][i][0]);
        }
      }
    }
    MM_UNROLL
    for (uint b = 0; b < kBatches; ++b) {
      if (is_used(b)) store_tile(result, args, at, m + b * kFragment, n, acc[b]);
    }
  }

 private:
  MM_CONST int kProducts = 16;

  static METAL_FUNC bool is_used(uint batch) { return batch == 0 || batch * kFragment < fc_batch; }

  // 16 values from k on of two rows of x, zero from `end` on.
  static METAL_FUNC void load_two(thread const XRow (&rows)[2], uint k, uint end,
                                  thread E (&xs)[2][kProducts]) {
    MM_UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[kProducts];
      load_x(rows[r], k, end, x);
      MM_UNROLL
      for (int j = 0; j < kProducts; ++j) xs[r][j] = static_cast<E>(x[j]);
    }
  }

  // acc += 8 rows of W * 8 rows of x over 128 values of K.
  static METAL_FUNC void multiply(thread const float (&w)[2][kProducts],
                                  thread const E (&xs)[2][kProducts],
                                  thread simdgroup_float8x8& acc) {
    MM_UNROLL
    for (int j = 0; j < kProducts; ++j) {
      simdgroup_matrix<E, kFragment, kFragment> a, b;
      a.thread_elements()[0] = static_cast<E>(w[0][j]);
      a.thread_elements()[1] = static_cast<E>(w[1][j]);
      b.thread_elements()[0] = xs[0][j];
      b.thread_elements()[1] = xs[1][j];
      simdgroup_multiply_accumulate(acc, a, b, acc);
    }
  }
};

}  // namespace metalmm
