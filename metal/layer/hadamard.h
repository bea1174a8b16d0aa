// Each kHadamardValues values one after the other times the Hadamard matrix over
// sqrt(kHadamardValues).
//
// Owner    a thread owns a value; a simdgroup those that are multiplied together.
// Traffic  every value once.
// Needs    whole simdgroups: kHadamardValues is their width.
#pragma once

#include <metal_simdgroup>

#include "../entry.h"

namespace metalmm {

// Value `lane` of the product, from value `lane` of x. All lanes of the simdgroup call it.
METAL_FUNC float hadamard(float x, uint lane) {
  MM_UNROLL
  for (uint step = 1; step < uint(kHadamardValues); step *= 2) {
    const float other = simd_shuffle_xor(x, ushort(step));
    x = (lane & step) ? other - x : x + other;
  }
  return x * kHadamardScale;
}

template <class T>
struct Hadamard {
  static METAL_FUNC void run(device const T* x, device T* y, constant KernelArgs& args,
                             Position at) {
    const ulong i = (ulong)at.tg.x * HadamardItems::kThreads + at.index;
    if (i >= args.count) return;  // a whole simdgroup: count is a multiple of its width
    y[i] = T(hadamard(float(x[i]), at.lane));
  }
};

}  // namespace metalmm
