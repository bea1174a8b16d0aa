// Stores: results of matrices through the epilogue, the tile's tails left out.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "../kernels/epilogue.h"
#include "mma.h"

namespace metalmm {

using namespace metal;

// y[m][n], and nothing outside it.
template <class T>
METAL_FUNC void store_inside(Result<T> result, constant KernelArgs& args, uint part, uint m, uint n,
                             float acc) {
  if (has_m_tail() && m >= args.m) return;
  if (has_n_tail() && n >= args.n) return;
  store_result(result, args, part, m, n, acc);
}

// acc[i][j] holds rows n + 8 i of W by rows m + 8 j of x, of fc_batch rows. The 8 lanes of a column
// of a matrix write 8 neighbours of a row of y.
template <class T, int kA, int kB>
METAL_FUNC void store_tile(Result<T> result, constant KernelArgs& args, Position at, uint m, uint n,
                           thread simdgroup_float8x8 (&acc)[kA][kB]) {
  const uint row = n + fragment_row(at.lane), column = m + fragment_column(at.lane);
  MM_UNROLL
  for (uint j = 0; j < kB; ++j) {
    if (j * kFragment >= fc_batch) break;
    MM_UNROLL
    for (uint i = 0; i < kA; ++i) {
      const uint rows = row + i * kFragment, columns = column + j * kFragment;
      store_inside(result, args, at.tg.z, columns, rows, acc[i][j].thread_elements()[0]);
      store_inside(result, args, at.tg.z, columns + 1, rows, acc[i][j].thread_elements()[1]);
    }
  }
}

}  // namespace metalmm
