// Rows of x in the order in which the lanes of gemm_small take them: the 8 values of a lane and
// those of its neighbours lie together, so that a load of a simdgroup touches 4 lines of 128 bytes
// of halves. In rows as they lie it touches 16, and those, not the bytes, bound it
// (docs/design.md).
//
// A run is kRun values of K of one row. A step of kK values of K of 8 rows is 4 x 32 runs: of both
// halves of the step, of both rows that a lane has, of its lanes.
#pragma once

#include "load.h"
#include "mma.h"

namespace metalmm {

struct Arranged {
  MM_CONST int kRun = 8, kRowsOfLane = 2;

  // The place of a run in x: a row of 8, and the value of a step with which it begins.
  struct Place {
    uint row, k;
  };
  static METAL_FUNC Place place(uint half_step, uint row, uint lane) {
    const uint r = fragment_row(lane);
    return {fragment_column(lane) + row,
            r / 2 * kChunkValues + r % 2 * kRun + half_step * 2 * kRun};
  }

  // Values of a step, of a tile of fc_batch rows of x; the first value of a lane of a step of the
  // tile that begins at m; and from there a run of 8 rows of x, `batch`.
  static METAL_FUNC uint step_values() {
    return fc_batch / kFragment * 2 * kRowsOfLane * kSimdWidth * kRun;
  }
  static METAL_FUNC ulong first(uint m, uint step, uint lane) {
    const uint steps = (fc_k + GemmSmallTile::kK - 1) / GemmSmallTile::kK;
    return (ulong(m / fc_batch) * steps + step) * step_values() + lane * kRun;
  }
  static METAL_FUNC uint run(uint batch, uint half_step, uint row) {
    return ((batch * 2 + half_step) * kRowsOfLane + row) * (kSimdWidth * kRun);
  }
};

}  // namespace metalmm
