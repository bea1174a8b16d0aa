// y[m, n] = x[m, :] . W[n, :]: one row of x per threadgroup.
//
// Owner    a simdgroup owns Geometry::kRows rows of W; its lanes own pieces of them (piece.h), in
//          units one after the other along K. With kShareRows the simdgroups of a threadgroup own
//          the same rows, take the units in turn and add up in threadgroup memory.
// Traffic  every byte of W once; x, and the weight of its norm, once per simdgroup, in registers
//          for all of its rows.
// Needs    threadgroup memory: the codebook, then kSimdgroups * (kRows + 1) floats with kShareRows.
//
// Norm     y = s (g x) . W[n, :], s = rsqrt(mean of x^2 + eps): a lane sums the squares of the x
//          in its registers, and the sums of W x are multiplied by s at the end. So a norm is no
//          pass, and no barrier, of its own. The squares cost 0.26 to 0.28 issue cycles a weight,
//          g as much, twice as much as bf16, an offset of g 0.25; half of that in gemv_wide_n.
//
// Cost     instructions and issue cycles per weight of every format: `python -m bench cells` counts
//          the compiled loop.
#pragma once

#include "gemv_core.h"

namespace metalmm {

template <class Format, class Geometry, class Source, class T>
METAL_FUNC void gemv(typename Source::Row x, device const uchar* weight, Result<T> result,
                     constant KernelArgs& args, threadgroup float4* memory, Position at) {
  constexpr int kRows = Geometry::kRows;
  threadgroup half2* book = reinterpret_cast<threadgroup half2*>(memory);
  fill<Format>(book, at.index, Geometry::kThreads);

  const uint m = at.tg.x, part = at.tg.z;
  const uint n = at.tg.y * Geometry::kN + (Geometry::kShareRows ? 0 : at.sg * kRows);
  if (!Geometry::kShareRows && has_n_tail() && n >= args.n) return;
  const long stride = weight_stride<Format>(args.w_stride);
  const Rows<Format, kRows> rows[1] = {Rows<Format, kRows>::of(weight, args, stride, n)};
  float acc[kRows] = {};
  float squares = 0.0f;
  const KRange k = k_of_part(args, part);
  if constexpr (Geometry::kShareRows) {
    accumulate<Format, 1, kRows, Source>(rows, x, k, at.lane, at.sg, Geometry::kSimdgroups, book,
                                         acc, squares);
    threadgroup float* sums = reinterpret_cast<threadgroup float*>(memory) + kCodebookBytes / 4;
    const float mine = sum_rows(acc, at.lane);
    if (at.lane < uint(kRows)) sums[at.sg * kRows + at.lane] = mine;
    threadgroup float* shared = sums + Geometry::kSimdgroups * kRows;
    if (has_norm()) {
      squares = simd_sum(squares);
      if (at.lane == 0) shared[at.sg] = squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.sg == 0 && at.lane < uint(kRows)) {
      float sum = sums[at.lane];
      for (uint s = 1; s < uint(Geometry::kSimdgroups); ++s) sum += sums[s * kRows + at.lane];
      if (has_norm()) {
        squares = shared[0];
        for (uint s = 1; s < uint(Geometry::kSimdgroups); ++s) squares += shared[s];
        sum *= norm_scale(squares, args.eps);
      }
      store_rows<kRows>(result, args, part, m, n, at.lane, sum);
    }
  } else {
    accumulate<Format, 1, kRows, Source>(rows, x, k, at.lane, 0, 1, book, acc, squares);
    const float sum = normalised(sum_rows(acc, at.lane), squares, args);
    store_rows<kRows>(result, args, part, m, n, at.lane, sum);
  }
}

template <class Format, class T, class Geometry>
struct Gemv {
  static METAL_FUNC void run(Activations<T> x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    using Source = NormX<T>;
    gemv<Format, Geometry, Source>(Source::row(x, args, at.tg.x), weight, result, args, memory, at);
  }
};
template <class Format, class T>
using GemvOne = Gemv<Format, T, GemvStandard>;
template <class Format, class T>
using GemvLong = Gemv<Format, T, GemvLargeK>;
template <class Format, class T>
using GemvWide = Gemv<Format, T, GemvWideN>;

}  // namespace metalmm
