// arrange_x: x in the order of the lanes that read it, TileOrder (tile/arranged.h) for gemm_small
// of more than 8 rows, PieceOrder for gemv_batched.
//
// Owner    A thread owns a run: 16 bytes of a row, zero beyond K and M.
// Traffic  x once, in vectors of 16 bytes; as much is written, neighbouring lanes neighbouring
//          runs.
// Needs    Nothing.
#pragma once

#include "../tile/arranged.h"

namespace metalmm {

// The place where run i of x begins.
struct Run {
  uint m, k;
};

struct TileOrder {
  static METAL_FUNC Run of(uint i, constant KernelArgs&) {
    const uint lane = i % kSimdWidth, row = i / kSimdWidth % 2, half_step = i / kSimdWidth / 2 % 2;
    const uint group = i / kSimdWidth / 4, batches = fc_batch / kFragment;
    const uint steps = (fc_k + GemmSmallTile::kK - 1) / GemmSmallTile::kK;
    const Arranged::Place place = Arranged::place(half_step, row, lane);
    return {(group / batches / steps * batches + group % batches) * kFragment + place.row,
            group / batches % steps * GemmSmallTile::kK + place.k};
  }
};

// Rows one after the other, of steps; of a step the first runs of all lanes, their second ones, and
// so on. args.n: values of a piece, which args.heads lanes own in turns (formats.def).
struct PieceOrder {
  static METAL_FUNC Run of(uint i, constant KernelArgs& args) {
    constexpr uint kRun = 4;
    const uint piece = args.n, weave = args.heads, turn = piece / weave;
    const uint lane = i % kSimdWidth, value = i / kSimdWidth % (piece / kRun) * kRun;
    const uint group = i / kSimdWidth / (piece / kRun), step = kSimdWidth * piece;
    const uint steps = (fc_k + step - 1) / step;
    return {group / steps, group % steps * step + (lane / weave * weave + value / turn) * piece +
                               lane % weave * turn + value % turn};
  }
};

template <class T, class Order>
struct ArrangeX {
  static METAL_FUNC void run(device const T* x, device T* arranged, constant KernelArgs& args,
                             Position at) {
    constexpr uint kRun = 16 / sizeof(T);
    const uint i = at.tg.x * ArrangeItems::kThreads + at.index;
    if (i >= args.count) return;
    const Run from = Order::of(i, args);
    T values[kRun];
    if (from.m < args.m) {
      load_x(x + long(from.m) * args.x_stride, from.k, fc_k, values);
    } else {
      MM_UNROLL
      for (uint j = 0; j < kRun; ++j) values[j] = T(0.0f);
    }
    MM_UNROLL
    for (uint j = 0; j < kRun; ++j) arranged[ulong(i) * kRun + j] = values[j];
  }
};

}  // namespace metalmm
