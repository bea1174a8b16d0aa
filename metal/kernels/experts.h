// Products with W of the experts that ids choose, [E, N, K]. A number outside 0 ... E - 1 is the
// nearest expert.
//
// expert_gemv   y[i, n] = x[i] . W[ids[i], n, :] + bias[ids[i], n], i a choice: a row of y each
// expert_up     y[i, n] = act(gate) * up, gate and up such products of two W
// expert_down   y[t, n] = c[t, n] + sum over i of s[t, i] r[t, i, n], where
//               r[t, i, n] = x[t, i] . W[ids[t, i], n, :] + bias[ids[t, i], n]
// expert_gemm   y[m, n] = x[m] . W[ids[tile of m], n, :], rows of x by expert
//
// Owner    as gemv, swiglu_up and gemm. expert_down: a threadgroup owns 4 rows of W of all experts
//          that a token chose; a simdgroup takes a choice at a time, or where there are fewer
//          choices than simdgroups a share of K of one.
// Traffic  every byte of W of a chosen expert once for each choice, of expert_gemm for each tile of
//          rows. expert_down leaves no product of a single choice in memory.
// Needs    as gemv, swiglu_up and gemm.
#pragma once

#include "gemm.h"
#include "gemv.h"

namespace metalmm {

METAL_FUNC long expert_of(device const long* ids, constant KernelArgs& args, uint choice) {
  return clamp(ids[choice], 0L, long(args.kv_heads) - 1);
}

// x of a choice.
template <class T>
METAL_FUNC typename NormX<T>::Row x_of_choice(device const T* x, constant KernelArgs& args,
                                              uint choice) {
  device const T* row = x + long(choice / args.positions) * args.x_stride;
  return {row, row, 0.0f};
}

template <class Format, class T>
struct ExpertGemv {
  static METAL_FUNC void run(device const T* x, device const long* ids, device const uchar* weight,
                             Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const long expert = expert_of(ids, args, at.tg.x);
    const Result<T> to = {result.y, result.bias + expert * args.window, result.c};
    gemv<Format, GemvStandard, NormX<T>>(x_of_choice(x, args, at.tg.x),
                                         weight + expert * args.head_stride, to, args, memory, at);
  }
};

// Tiles of no expert are those that no row needs.
template <class Format, class T>
struct ExpertGemm {
  static METAL_FUNC void run(device const T* x, device const long* ids, device const uchar* weight,
                             Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const long expert = ids[at.tg.x];
    if (expert < 0) return;
    Gemm<Format, T>::run(x, weight + expert * args.head_stride, result, args, memory, at);
  }
};

// Gate and up as one. Comparisons, not min and max: a NaN stays one.
METAL_FUNC float gated(float gate, float up, constant KernelArgs& args) {
  if (fc_epilogue & kExpertLimit) {
    const float limit = args.softcap;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  if (fc_epilogue & kExpertOai) return gate / (1.0f + exp(-args.alpha * gate)) * (up + 1.0f);
  return ActMul::of(gate, up);
}

template <class Format, class T>
struct ExpertGateUp {
  static METAL_FUNC void run(device const T* x, device const long* ids, device const uchar* gate,
                             device const uchar* up, Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    constexpr int kRows = SwigluUp::kRows;
    threadgroup half2* book = reinterpret_cast<threadgroup half2*>(memory);
    fill<Format>(book, at.index, SwigluUp::kThreads);
    const uint m = at.tg.x, n = at.tg.y * SwigluUp::kN + at.sg * kRows;
    if (has_n_tail() && n >= args.n) return;
    const long expert = expert_of(ids, args, m);
    using Rows = metalmm::Rows<Format, kRows>;
    const Rows rows[2] = {
        Rows::of(gate + expert * args.head_stride, args, weight_stride<Format>(args.w_stride), n),
        Rows::of(up + expert * args.sequence_stride, args, weight_stride<Format>(args.w2_stride),
                 n)};
    float acc[2 * kRows] = {}, squares = 0.0f;
    accumulate<Format, 2, kRows, NormX<T>>(rows, x_of_choice(x, args, m), {0, fc_k}, at.lane, 0, 1,
                                           book, acc, squares);
    float mine[2] = {};
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float g = simd_sum(acc[r]), u = simd_sum(acc[kRows + r]);
      if (at.lane == uint(r)) {
        mine[0] = g;
        mine[1] = u;
      }
    }
    const uint row = n + at.lane;
    if (at.lane >= uint(kRows) || (has_n_tail() && row >= args.n)) return;
    if (fc_epilogue & kEpilogueBias) {
      device const T* bias = result.bias + expert * args.window + row * args.count;
      mine[0] += float(bias[0]);
      mine[1] += float(bias[args.rotated]);
    }
    result.y[(long)m * args.y_stride + row] = T(gated(mine[0], mine[1], args));
  }
};

template <class Format, class T>
struct ExpertDown {
  using Geometry = GemvLargeK;  // the simdgroups share choices, as its share K

  static METAL_FUNC void run(device const T* x, device const uchar* scores, device const long* ids,
                             device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    constexpr int kRows = Geometry::kRows;
    constexpr uint kSimdgroups = Geometry::kSimdgroups;
    threadgroup half2* book = reinterpret_cast<threadgroup half2*>(memory);
    fill<Format>(book, at.index, Geometry::kThreads);
    const uint n = at.tg.y * Geometry::kN, choices = args.heads;
    const uint sharing = max(kSimdgroups / choices, 1u);  // simdgroups of a choice
    const long stride = weight_stride<Format>(args.w_stride);
    const bool has_bias = (fc_epilogue & kEpilogueBias) != 0 && at.lane < uint(kRows) &&
                          (!has_n_tail() || n + at.lane < args.n) && at.sg % sharing == 0;
    float sums[kRows] = {}, of_bias = 0.0f, squares = 0.0f;
    for (uint c = at.sg / sharing; c < choices; c += kSimdgroups / sharing) {
      const uint choice = at.tg.x * choices + c;
      const long expert = expert_of(ids, args, choice);
      const float score = score_of(scores, choice);
      const Rows<Format, kRows> rows[1] = {
          Rows<Format, kRows>::of(weight + expert * args.head_stride, args, stride, n)};
      float acc[kRows] = {};
      accumulate<Format, 1, kRows, NormX<T>>(rows, x_of_choice(x, args, choice), {0, fc_k}, at.lane,
                                             at.sg % sharing, sharing, book, acc, squares);
      MM_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r] = fma(score, acc[r], sums[r]);
      if (has_bias) {
        of_bias = fma(score, float(result.bias[expert * args.window + n + at.lane]), of_bias);
      }
    }
    threadgroup float* all = reinterpret_cast<threadgroup float*>(memory) + kCodebookBytes / 4;
    const float mine = sum_rows(sums, at.lane) + of_bias;
    if (at.lane < uint(kRows)) all[at.sg * kRows + at.lane] = mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.sg != 0 || at.lane >= uint(kRows) || (has_n_tail() && n + at.lane >= args.n)) return;
    float sum = all[at.lane];
    for (uint s = 1; s < kSimdgroups; ++s) sum += all[s * kRows + at.lane];
    const long to = (long)at.tg.x * args.y_stride + n + at.lane;
    if (fc_epilogue & kEpilogueC) sum += float(result.c[to]);
    result.y[to] = T(sum);
  }

 private:
  static METAL_FUNC float score_of(device const uchar* scores, uint choice) {
    if (fc_epilogue & kExpertFloatScores) {
      return reinterpret_cast<device const float*>(scores)[choice];
    }
    return float(reinterpret_cast<device const T*>(scores)[choice]);
  }
};

}  // namespace metalmm
