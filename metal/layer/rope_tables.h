// rope_tables: cos and sin of the angles by which heads are rotated, position * frequency.
//
// Owner    a thread owns a frequency of a position.
// Traffic  every cos and every sin once; positions and frequencies from the cache.
// Needs    angles below 2^22: beyond, the reduction to a quarter of pi loses bits.
#pragma once

#include "../entry.h"

namespace metalmm {

// {cos x, sin x}, off by less than 2^-23. x less n quarters of a turn, in three steps: below 2^22
// the first is exact, since n times the 24 bits of pi / 2 is a multiple of 2^-23 near x. (cos of
// Metal is either fast, for angles up to pi, or precise, and which one is the compiler's choice.)
METAL_FUNC float2 cos_sin(float x) {
  const float n = rint(x * 0.636619772f);
  float r = fma(-n, 1.57079637f, x);
  r = fma(n, 4.37113883e-8f, r);
  r = fma(n, 1.71512451e-15f, r);
  const float r2 = r * r;
  const float s = fma(r * r2, fma(r2, fma(r2, -1.95152959e-4f, 8.33216087e-3f), -0.166666546f), r);
  const float c = fma(r2 * r2, fma(r2, fma(r2, 2.44331571e-5f, -1.38873163e-3f), 4.16666457e-2f),
                      fma(-0.5f, r2, 1.0f));
  const uint quarter = uint(n - 4.0f * floor(0.25f * n));
  const float2 turned = quarter & 1 ? float2(-s, c) : float2(c, s);
  return quarter & 2 ? -turned : turned;
}

template <class T>
struct RopeTables {
  struct From {
    device const long* positions;  // [kv_heads, m]
    device const float* frequencies;
    device const long* axes;
  };

  static METAL_FUNC void run(From from, device T* y, device T* sines, constant KernelArgs& args,
                             Position at) {
    const uint item = at.tg.x * TableItems::kThreads + at.index;
    const uint m = item / fc_k, f = item % fc_k;
    if (m >= args.m) return;
    long axis = 0;
    if (fc_epilogue & kTablesAxes) axis = clamp(from.axes[f], 0L, long(args.kv_heads) - 1);
    const float2 pair =
        cos_sin(float(from.positions[axis * args.m + m]) * from.frequencies[f]) * args.alpha;
    const bool is_twice = (fc_epilogue & kTablesTwice) != 0;
    const bool is_interleaved = (fc_epilogue & kTablesInterleaved) != 0;
    const ulong first = ulong(m) * args.n + (is_interleaved ? 2 * f : f);
    y[first] = T(pair.x);
    sines[first] = T(pair.y);
    if (!is_twice) return;
    const ulong second = first + (is_interleaved ? 1 : fc_k);
    y[second] = T(pair.x);
    sines[second] = T(pair.y);
  }
};

}  // namespace metalmm
