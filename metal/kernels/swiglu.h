// The two halves of a SwiGLU layer: gate and up projections in one pass, and the down projection
// of act(gate) * up; act is an Activation.
#pragma once

#include "gemv.h"

namespace metalmm {

// y[m, n] = act(alpha x . Wgate[n, :]) * (x . Wup[n, :]), the product in f32, rounded once. x may
// have a norm, as in gemv.
//
// Owner    a simdgroup owns kRows rows of each matrix.
// Traffic  every byte of both matrices once; x, and the weight of its norm, once per simdgroup, not
//          once per matrix.
// Needs    threadgroup memory for the codebook.
template <class Format, class T>
struct SwigluGateUp {
  static METAL_FUNC void run(Activations<T> x, device const uchar* gate, device const uchar* up,
                             Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    using Source = NormX<T>;
    constexpr int kRows = SwigluUp::kRows;
    threadgroup half2* book = reinterpret_cast<threadgroup half2*>(memory);
    fill<Format>(book, at.index, SwigluUp::kThreads);
    const uint m = at.tg.x, n = at.tg.y * SwigluUp::kN + at.sg * kRows;
    if (has_n_tail() && n >= args.n) return;
    using Rows = metalmm::Rows<Format, kRows>;
    const Rows rows[2] = {Rows::of(gate, args, weight_stride<Format>(args.w_stride), n),
                          Rows::of(up, args, weight_stride<Format>(args.w2_stride), n)};
    float acc[2 * kRows] = {}, squares = 0.0f;
    accumulate<Format, 2, kRows, Source>(rows, Source::row(x, args, m), {0, fc_k}, at.lane, 0, 1,
                                         book, acc, squares);
    const float scale = has_norm() ? norm_scale(simd_sum(squares), args.eps) : 1.0f;
    float mine = 0.0f;
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float g = simd_sum(acc[r]), u = simd_sum(acc[kRows + r]);
      if (has_norm()) {
        g *= scale;
        u *= scale;
      }
      if (at.lane == uint(r)) mine = ActMul::of(g * args.alpha, u);
    }
    store_rows<kRows>(result, args, 0, m, n, at.lane, mine);
  }
};

// y[m, n] = (act(gate[m, :]) * up[m, :]) . W[n, :]; gemv with another source of x. An exponential
// per value of K and simdgroup: kRows rows of W share it.
template <class Format, class T>
struct SwigluDown {
  static METAL_FUNC void run(device const T* gate, device const T* up, device const uchar* weight,
                             Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const typename ActMulX<T>::Row x = {x_row(gate, args, at.tg.x), x_row(up, args, at.tg.x)};
    gemv<Format, GemvStandard, ActMulX<T>>(x, weight, result, args, memory, at);
  }
};

}  // namespace metalmm
