// Sums of four values over 16 lanes, a value a lane.
#pragma once

#include <metal_simdgroup>

#include "../entry.h"

namespace metalmm {

// The index of the sum, of four, that a lane gets. The 16 lanes differ in 4 bits from kFirst on.
template <int kFirst>
METAL_FUNC uint summed_by(uint lane) {
  return lane / kFirst & 3;
}

// Sums each of the fours over the lanes; a lane gets sum [summed_by(lane)]. The first two rounds
// halve what a lane has: five values are exchanged, for 16 if each lane had all four sums. The
// fours go side by side, since a lane waits for what it is given.
template <int kFirst, int kFours>
METAL_FUNC void sum_fours(thread const float (&fours)[kFours][4], uint lane,
                          thread float (&sums)[kFours]) {
  const bool odd = lane & kFirst, upper = lane & 2 * kFirst;
  float pairs[kFours][2];
  MM_UNROLL
  for (int f = 0; f < kFours; ++f) {
    MM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float even = fours[f][2 * i], other = fours[f][2 * i + 1];
      pairs[f][i] = (odd ? other : even) + simd_shuffle_xor(odd ? even : other, ushort(kFirst));
    }
  }
  MM_UNROLL
  for (int f = 0; f < kFours; ++f) {
    const float given = upper ? pairs[f][0] : pairs[f][1];
    sums[f] = (upper ? pairs[f][1] : pairs[f][0]) + simd_shuffle_xor(given, ushort(2 * kFirst));
  }
  MM_UNROLL
  for (int far = 4 * kFirst; far <= 8 * kFirst; far *= 2) {
    MM_UNROLL
    for (int f = 0; f < kFours; ++f) sums[f] += simd_shuffle_xor(sums[f], ushort(far));
  }
}

// Each lane's value of summed_by(lane), in all 16 lanes.
template <int kFirst>
METAL_FUNC void share_four(float mine, uint lane, thread float (&v)[4]) {
  const bool odd = lane & kFirst, upper = lane & 2 * kFirst;
  const float other = simd_shuffle_xor(mine, ushort(2 * kFirst));
  const float pair[2] = {upper ? other : mine, upper ? mine : other};
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float far = simd_shuffle_xor(pair[i], ushort(kFirst));
    v[2 * i] = odd ? far : pair[i];
    v[2 * i + 1] = odd ? pair[i] : far;
  }
}

// simd_sum of each of the values, side by side.
template <int kCount>
METAL_FUNC void sum_each(thread float (&v)[kCount]) {
  MM_UNROLL
  for (int far = 1; far < kSimdWidth; far *= 2) {
    MM_UNROLL
    for (int i = 0; i < kCount; ++i) v[i] += simd_shuffle_xor(v[i], ushort(far));
  }
}

}  // namespace metalmm
