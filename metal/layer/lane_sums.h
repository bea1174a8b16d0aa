// Sums of four values over 16 lanes, a value a lane.
#pragma once

#include <metal_simdgroup>

#include "../entry.h"

namespace metalmm {

// Which of the four sums a lane gets. The 16 lanes differ in 4 bits from kFirst on.
template <int kFirst>
METAL_FUNC uint summed_by(uint lane) {
  return (lane & kFirst ? 2 : 0) + (lane & 2 * kFirst ? 1 : 0);
}

// The sum of v[summed_by(lane)] over the lanes. The first two rounds halve what a lane has: five
// values are exchanged, for 16 if each lane had all four sums.
template <int kFirst>
METAL_FUNC float sum_of_four(thread const float (&v)[4], uint lane) {
  const bool upper = lane & kFirst, odd = lane & 2 * kFirst;
  float pair[2];
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    pair[i] = (upper ? v[2 + i] : v[i]) + simd_shuffle_xor(upper ? v[i] : v[2 + i], ushort(kFirst));
  }
  const float given = odd ? pair[0] : pair[1];
  float sum = (odd ? pair[1] : pair[0]) + simd_shuffle_xor(given, ushort(2 * kFirst));
  sum += simd_shuffle_xor(sum, ushort(4 * kFirst));
  return sum + simd_shuffle_xor(sum, ushort(8 * kFirst));
}

// Each lane's value of summed_by(lane), in all 16 lanes.
template <int kFirst>
METAL_FUNC void share_four(float mine, uint lane, thread float (&v)[4]) {
  const bool upper = lane & kFirst, odd = lane & 2 * kFirst;
  const float other = simd_shuffle_xor(mine, ushort(2 * kFirst));
  const float pair[2] = {odd ? other : mine, odd ? mine : other};
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float far = simd_shuffle_xor(pair[i], ushort(kFirst));
    v[i] = upper ? far : pair[i];
    v[2 + i] = upper ? pair[i] : far;
  }
}

}  // namespace metalmm
