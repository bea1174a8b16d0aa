// arrange_x: x in the order of tile/arranged.h, for gemm_small of more than 8 rows.
//
// Owner    A thread owns a run: 8 values of a row, zero beyond K and M.
// Traffic  x once, in vectors of 16 bytes; as much is written, neighbouring lanes neighbouring
// runs. Needs    Nothing.
#pragma once

#include "../tile/arranged.h"

namespace metalmm {

template <class T>
struct ArrangeX {
  static METAL_FUNC void run(device const T* x, device T* arranged, constant KernelArgs& args,
                             Position at) {
    constexpr uint kRun = Arranged::kRun;
    const uint i = at.tg.x * ArrangeItems::kThreads + at.index;
    if (i >= args.count) return;
    const uint lane = i % kSimdWidth, row = i / kSimdWidth % 2, half_step = i / kSimdWidth / 2 % 2;
    const uint group = i / kSimdWidth / 4, batches = fc_batch / kFragment;
    const uint steps = (fc_k + GemmSmallTile::kK - 1) / GemmSmallTile::kK;
    const Arranged::Place place = Arranged::place(half_step, row, lane);
    const uint m = (group / batches / steps * batches + group % batches) * kFragment + place.row;
    const uint k = group / batches % steps * GemmSmallTile::kK + place.k;
    T values[kRun];
    if (m < args.m) {
      load_x(x + long(m) * args.x_stride, k, fc_k, values);
    } else {
      MM_UNROLL
      for (uint j = 0; j < kRun; ++j) values[j] = T(0.0f);
    }
    MM_UNROLL
    for (uint j = 0; j < kRun; ++j) arranged[ulong(i) * kRun + j] = values[j];
  }
};

}  // namespace metalmm
