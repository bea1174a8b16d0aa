// gemv_coalesced, the second rung of the ladder: plainly decoded. The first, one thread per result,
// is gemm_naive.
#pragma once

#include "gemv_core.h"

namespace metalmm {

// acc + 16 values of w x, of w g x where x has a norm.
template <class Format, class T>
METAL_FUNC float add16(Row row, typename NormX<T>::Row x, uint k, uint end, float acc,
                       thread float& squares) {
  float w[16], xs[16];
  load_weights<Format>(row, k, end, w);
  load_x(x.x, k, end, xs);
  if (has_norm()) squares = add_squares(xs, squares);
  if (norm_has_weight()) {
    float weight[16];
    load_x(x.norm, k, end, weight);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) xs[i] *= norm_factor(weight[i], x.offset);
  }
  MM_UNROLL
  for (int i = 0; i < 16; ++i) acc = fma(w[i], xs[i], acc);
  return acc;
}

// Owner    a simdgroup owns a result; a lane takes every 32nd 16 values.
// Traffic  every byte of W once, neighbouring lanes neighbouring bytes; x, and the weight
//          of its norm, once per row of W.
// Needs    nothing.
template <class Format, class T>
struct GemvSimdgroup {
  static METAL_FUNC void run(Activations<T> x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4*, Position at) {
    const uint m = at.tg.x, n = at.tg.y * GemvCoalesced::kN + at.sg;
    if (has_n_tail() && n >= args.n) return;
    const Row row = weight_row<Format>(weight, args, n);
    const typename NormX<T>::Row xs = NormX<T>::row(x, args, m);
    const KRange range = k_of_part(args, at.tg.z);
    float acc = 0.0f, squares = 0.0f;
    for (uint k = range.begin + 16 * at.lane; k < range.end; k += 16 * kSimdWidth) {
      acc = add16<Format, T>(row, xs, k, range.end, acc, squares);
    }
    acc = normalised(simd_sum(acc), squares, args);
    if (at.lane == 0) store_result(result, args, at.tg.z, m, n, acc);
  }
};

}  // namespace metalmm
