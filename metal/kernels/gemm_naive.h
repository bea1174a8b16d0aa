// gemm_naive: y = x W^T, a thread per result: the baseline of every other gemm.
//
// Owner    A threadgroup owns 64 rows of W by one row of x; thread t owns y[m][n + t] and walks K.
// Traffic  W is read and decoded M times, x N / 64 times (its threads read the same 16 values). A
//          thread reads its own row of W, so neighbouring threads read memory a row apart.
// Cost     A weight is decoded for every fma.
// Needs    Nothing: no threadgroup memory, no simdgroup function.
#pragma once

#include "../tile/load.h"
#include "epilogue.h"

namespace metalmm {

template <class Format, class T>
struct GemmNaive {
  using Tile = GemmNaiveTile;

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4*, Position at) {
    const uint n = at.tg.y * Tile::kN + at.index, m = at.tg.x;
    if (has_n_tail() && n >= args.n) return;
    const Row w_from = weight + long(n) * weight_stride<Format>(args.w_stride);
    device const T* x_from = x + long(m) * args.x_stride;

    float acc = 0.0f;
    const KRange range = k_of_part(args, at.tg.z);
    for (uint k = range.begin; k < range.end; k += Tile::kK) {
      float w[Tile::kK], xs[Tile::kK];
      load_weights<Format>(w_from, k, range.end, w);
      load_x(x_from, k, range.end, xs);
      MM_UNROLL
      for (int i = 0; i < Tile::kK; ++i) acc = fma(w[i], xs[i], acc);
    }
    store_result(result, args, at.tg.z, m, n, acc);
  }
};

}  // namespace metalmm
