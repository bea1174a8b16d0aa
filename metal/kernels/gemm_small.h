// gemm_small: y = x W^T for few rows of x; W is decoded into the registers of the matrix unit.
//
// Owner    A threadgroup owns 16 rows of W by fc_batch rows of x, 8 to 32; its simdgroups take
//          steps of 128 values of K in turn and add up in threadgroup memory. A simdgroup holds two
//          8 x 8 matrices of f32 sums for 8 rows of x. 16 products of matrices cover a step: column
//          c of the W matrix and row c of the x matrix of product j are value
//          32 (c / 2) + 16 (j / 8) + 8 (c % 2) + j % 8. (A sum over K may take any order: this
//          costs nothing, and no lane needs another's values.)
//            W   a lane holds row r, columns 2 p and 2 p + 1: it decodes the 32 values from 32 p on
//            x   a lane holds row c, columns q and q + 1: it loads 8 values twice of two rows of x;
//                the lane of row c + 1 or c - 1 loads the 8 beside them
// Traffic  W is read M / fc_batch times, x once per 16 rows of W (from the cache, but for the
//          first), more than 8 rows of it as arrange_x wrote them. Per 128 values of K a lane
//          decodes 64 weights and loads 32 of x for 8 rows of x, for 32 products.
// Cost     Per weight of q4_0 1.8 bitwise, 2 fma, 1.1 shifts and conversions, 0.3 selects and 0.5
//          multiplications of matrices (clang 22, f32 x, 8 rows). Loads as in gemm.
// Needs    kSimdgroups * 16 * fc_batch floats of threadgroup memory, one barrier. Operands are
// those of
//          gemm: half for f16 x, which rounds W to 11 bits; float for f32 and bf16 x.
//
// Rejected: simdgroups with 16 rows of W each and all of K: with N = 14336 that is 896 simdgroups,
// 7 a core of an H200, each of which waits for memory 32 times.
#pragma once

#include "../tile/arranged.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct GemmSmall {
  using Tile = GemmSmallTile;
  using E = typename MatrixOperand<T>::type;
  using XRow = device const T*;

  static METAL_FUNC void run(device const T* x, device const T* arranged,
                             device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    constexpr int kMatrices = Tile::kN / kFragment;
    constexpr int kBatches = Tile::rows(is_same<T, half>::value) / kFragment;
    static_assert(Tile::kK == kFragment * kProducts, "16 values of a row of x a lane");

    const uint n = at.tg.y * Tile::kN, m = at.tg.x * fc_batch;
    const uint row = fragment_row(at.lane), column = fragment_column(at.lane);
    const XRow x_rows[2] = {x_row(x, args, m + column), x_row(x, args, m + column + 1)};
    Row w_rows[kMatrices];
    MM_UNROLL
    for (int i = 0; i < kMatrices; ++i) {
      w_rows[i] = weight_row<Format>(weight, args, n + i * kFragment + row);
    }

    simdgroup_float8x8 acc[kBatches][kMatrices];
    clear(acc);
    const KRange range = k_of_part(args, at.tg.z);
    constexpr uint kStride = Tile::kSimdgroups * Tile::kK;
    const uint begin = range.begin + at.sg * Tile::kK;
    XRow x_at = arranged + Arranged::first(m, begin / Tile::kK, at.lane);
    for (uint k = begin; k < range.end; k += kStride) {
#if defined(MM_ALL_ROWS_AT_ONCE)
      // A target of the stand-in spills a pointer that is held: q4_k, M = 32, 14336 x 4096, on an
      // H100 51.5 us in the place of 47.9.
      x_at = arranged + Arranged::first(m, k / Tile::kK, at.lane);
#endif
      // A multiple of 32, visibly: both halves of a block are then read once.
      const uint first = (k + kProducts * column) / kChunkValues * kChunkValues;
      MM_UNROLL
      for (uint half_step = 0; half_step < 2; ++half_step) {
        E xs[kBatches][2][kRun];
        if (fc_batch > kFragment) {
          MM_UNROLL
          for (uint b = 0; b < kBatches; ++b) {
            MM_UNROLL
            for (uint r = 0; r < 2; ++r) {
              if (!is_used(b)) continue;
              load_vectors(x_at + Arranged::run(b, half_step, r), xs[b][r]);
            }
          }
        } else {
          MM_UNROLL
          for (uint r = 0; r < 2; ++r) {
            load_x(x_rows[r], k + Arranged::place(half_step, r, at.lane).k, range.end, xs[0][r]);
          }
        }
        MM_UNROLL
        for (int i = 0; i < kMatrices; ++i) {
          E w[kProducts];
          load_weights<Format>(w_rows[i], first + half_step * kProducts, range.end, w);
          MM_UNROLL
          for (uint b = 0; b < kBatches; ++b) {
            if (is_used(b)) multiply(w, xs[b], acc[b][i]);
          }
        }
      }
      x_at += Tile::kSimdgroups * Arranged::step_values();
    }
    store_sums(result, args, reinterpret_cast<threadgroup float2*>(memory), at, acc);
  }

 private:
  MM_CONST int kProducts = 16, kRun = Arranged::kRun;

  static METAL_FUNC bool is_used(uint batch) { return batch == 0 || batch * kFragment < fc_batch; }

  // acc += 8 rows of W * 8 rows of x over 64 values of K.
  static METAL_FUNC void multiply(thread const E (&w)[kProducts], thread const E (&xs)[2][kRun],
                                  thread simdgroup_float8x8& acc) {
    MM_UNROLL
    for (int i = 0; i < kRun; ++i) {
      simdgroup_matrix<E, kFragment, kFragment> a, b;
      a.thread_elements()[0] = w[i];
      a.thread_elements()[1] = w[kRun + i];
      b.thread_elements()[0] = xs[0][i];
      b.thread_elements()[1] = xs[1][i];
      simdgroup_multiply_accumulate(acc, a, b, acc);
    }
  }

  // Adds what the simdgroups hold; each stores some of the matrices.
  template <int kBatches, int kMatrices>
  static METAL_FUNC void store_sums(Result<T> result, constant KernelArgs& args,
                                    threadgroup float2* sums, Position at,
                                    thread simdgroup_float8x8 (&acc)[kBatches][kMatrices]) {
    const uint all = fc_batch / kFragment * kMatrices;
    MM_UNROLL
    for (uint b = 0; b < kBatches; ++b) {
      MM_UNROLL
      for (uint i = 0; i < kMatrices; ++i) {
        if (is_used(b)) {
          const uint to = (at.sg * all + b * kMatrices + i) * kSimdWidth + at.lane;
          sums[to] = float2(acc[b][i].thread_elements()[0], acc[b][i].thread_elements()[1]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = at.sg; t < all; t += Tile::kSimdgroups) {
      float2 sum = sums[t * kSimdWidth + at.lane];
      MM_UNROLL
      for (uint s = 1; s < Tile::kSimdgroups; ++s) {
        sum += sums[(s * all + t) * kSimdWidth + at.lane];
      }
      const uint n = at.tg.y * Tile::kN + t % kMatrices * kFragment + fragment_row(at.lane);
      const uint m = at.tg.x * fc_batch + t / kMatrices * kFragment + fragment_column(at.lane);
      store_inside(result, args, at.tg.z, m, n, sum.x);
      store_inside(result, args, at.tg.z, m + 1, n, sum.y);
    }
  }
};

}  // namespace metalmm
