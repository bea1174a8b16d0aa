// gemv_coalesced, the second rung of the ladder: plainly decoded. The first, one thread per result,
// is gemm_naive.
#pragma once

#include "gemv_core.h"

namespace metalmm {

// acc + 16 values of w x.
template <class Format, class T>
METAL_FUNC float add16(Row row, device const T* x, uint k, uint end, float acc) {
  float w[16], xs[16];
  load_weights<Format>(row, k, end, w);
  load_x(x, k, end, xs);
  MM_UNROLL
  for (int i = 0; i < 16; ++i) acc = fma(w[i], xs[i], acc);
  return acc;
}

// Owner    a simdgroup owns a result; a lane takes every 32nd 16 values.
// Traffic  every byte of W once, neighbouring lanes neighbouring bytes; x once per row of W.
// Needs    nothing.
template <class Format, class T>
struct GemvSimdgroup {
  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4*, Position at) {
    const uint m = at.tg.x, n = at.tg.y * GemvCoalesced::kN + at.sg;
    if (has_n_tail() && n >= args.n) return;
    const Row row = weight_row<Format>(weight, args, n);
    device const T* xs = x_row(x, args, m);
    const KRange range = k_of_part(args, at.tg.z);
    float acc = 0.0f;
    for (uint k = range.begin + 16 * at.lane; k < range.end; k += 16 * kSimdWidth) {
      acc = add16<Format>(row, xs, k, range.end, acc);
    }
    acc = simd_sum(acc);
    if (at.lane == 0) store_result(result, args, at.tg.z, m, n, acc);
  }
};

}  // namespace metalmm
