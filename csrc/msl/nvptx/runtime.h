// On an NVIDIA GPU a threadgroup is a block and a simdgroup a warp: where a thread is, and
// the lanes of a warp.
#pragma once

#include "language/types.h"

namespace metal {
namespace warp {

constexpr constant uint kWidth = 32;
constexpr constant uint kAll = 0xFFFFFFFFu;  // every lane takes part; Metal asks for it too

// The number that Metal's shader gives a lane of a warp, and back. With MM_MATRIX_LANES (the shader
// uses simdgroup matrices) they differ: bit 3 of Metal's number is bit 1 of the warp's. Then a
// lane's two elements of an 8 x 8 matrix are those of the fragments of mma.sync, and matrices
// need no exchange between lanes. Bits move, so an exchange with lane n ^ m stays one with
// hardware_lane(m).
#ifdef MM_MATRIX_LANES
METAL_FUNC constexpr uint hardware_lane(uint metal) {
  return (metal & 17) | (metal & 6) << 1 | (metal & 8) >> 2;
}
METAL_FUNC constexpr uint metal_lane(uint hardware) {
  return (hardware & 17) | (hardware & 12) >> 1 | (hardware & 2) << 2;
}
#else
METAL_FUNC constexpr uint hardware_lane(uint metal) { return metal; }
METAL_FUNC constexpr uint metal_lane(uint hardware) { return hardware; }
#endif

METAL_FUNC uint lane() { return metal_lane(__nvvm_read_ptx_sreg_tid_x() % kWidth); }

// A word of another lane.
METAL_FUNC uint word_from_lane(uint word, uint metal) {
  const int lane = static_cast<int>(hardware_lane(metal));
  return static_cast<uint>(__nvvm_shfl_sync_idx_i32(kAll, static_cast<int>(word), lane, 31));
}
METAL_FUNC uint word_from_lane_xor(uint word, uint metal_mask) {
  const int mask = static_cast<int>(hardware_lane(metal_mask));
  return static_cast<uint>(__nvvm_shfl_sync_bfly_i32(kAll, static_cast<int>(word), mask, 31));
}

}  // namespace warp
}  // namespace metal
