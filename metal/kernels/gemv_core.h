// What the gemv strategies share: sources of x, the walk of a simdgroup along its rows, the sum
// over lanes. Every strategy that walks here adds in the same order, so their results are equal bit
// for bit as long as one simdgroup owns all of K.
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../formats/format.h"
#include "../tile/load.h"
#include "epilogue.h"

namespace metalmm {

using namespace metal;

// Four neighbours of a row, in one load where alignment is known.
template <class T>
METAL_FUNC float4 load_vector(device const T* p) {
  if (x_is_aligned()) return float4(*(device const vec<T, 4>*)p);
  return float4(p[0], p[1], p[2], p[3]);
}

// x as it is.
template <class T>
struct PlainX {
  using Row = device const T*;
  static METAL_FUNC float4 load(Row x, uint k) { return load_vector(x + k); }
  static METAL_FUNC float value(Row x, uint k) { return float(x[k]); }
};

METAL_FUNC float silu(float x) { return x / (1.0f + exp(-x)); }

// silu(gate) * up, in f32.
template <class T>
struct SiluMulX {
  struct Row {
    device const T* gate;
    device const T* up;
  };
  static METAL_FUNC float value(Row x, uint k) { return silu(float(x.gate[k])) * float(x.up[k]); }
  static METAL_FUNC float4 load(Row x, uint k) {
    const float4 g = load_vector(x.gate + k), u = load_vector(x.up + k);
    return float4(silu(g.x), silu(g.y), silu(g.z), silu(g.w)) * u;
  }
};

// What a lane multiplies its piece of a unit by.
template <class Format, class Source>
METAL_FUNC void load_piece(typename Source::Row x, uint unit, uint piece,
                           thread XPiece<Format>& out) {
  const uint k = unit * (Format::kLanes * Format::kValues) + Format::first(piece);
  MM_UNROLL
  for (int r = 0; r < Format::kValues / Format::kRun; ++r) {
    MM_UNROLL
    for (int i = 0; i < Format::kRun; i += 4) {
      const float4 v = Source::load(x, k + r * Format::kRunStride + i);
      MM_UNROLL
      for (int j = 0; j < 4; ++j) out.x[r * Format::kRun + i + j] = v[j];
    }
  }
  sum_segments(out);
}

// The units of K that a lane visits: every step-th from `first`, of those below `end`.
template <class Format>
struct Walk {
  uint first, end, step, piece;

  // Lanes next to each other own pieces next to each other; `sg` of `simdgroups` share the range.
  static METAL_FUNC Walk of(KRange k, uint lane, uint sg, uint simdgroups) {
    constexpr uint kUnit = Format::kLanes * Format::kValues;
    constexpr uint kUnits = kSimdWidth / Format::kLanes;
    return {k.begin / kUnit + sg * kUnits + lane / Format::kLanes, k.end / kUnit,
            simdgroups * kUnits, lane % Format::kLanes};
  }
};

// A dense row may end within a unit: one value per lane.
template <class Format, int kRows, class Source>
METAL_FUNC void add_tail(thread const typename Format::Row (&rows)[kRows], typename Source::Row x,
                         KRange k, uint lane, thread float (&acc)[kRows]) {
  if constexpr (Format::kIsDense) {
    const uint at = k.end / Format::kValues * Format::kValues + lane;
    if (at < k.end) {
      MM_UNROLL
      for (int r = 0; r < kRows; ++r) {
        acc[r] = fma(Format::value(rows[r], at), Source::value(x, at), acc[r]);
      }
    }
  }
}

// acc[r] += the lane's share of row r times x.
template <class Format, int kRows, class Source>
METAL_FUNC void accumulate(thread const typename Format::Row (&rows)[kRows], typename Source::Row x,
                           KRange k, uint lane, uint sg, uint simdgroups, Codebook book,
                           thread float (&acc)[kRows]) {
  const Walk<Format> walk = Walk<Format>::of(k, lane, sg, simdgroups);
  for (uint unit = walk.first; unit < walk.end; unit += walk.step) {
    XPiece<Format> xs;
    load_piece<Format, Source>(x, unit, walk.piece, xs);
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Piece<Format> p;
      Format::load(rows[r], unit, walk.piece, book, p);
      acc[r] = dot(p, xs, acc[r]);
    }
  }
  if (sg == 0) add_tail<Format, kRows, Source>(rows, x, k, lane, acc);
}

// Lane r gets the sum of acc[r] over the simdgroup; lanes from kRows on get 0.
template <int kRows>
METAL_FUNC float sum_rows(thread const float (&acc)[kRows], uint lane) {
  float mine = 0.0f;
  MM_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float sum = simd_sum(acc[r]);
    if (lane == uint(r)) mine = sum;
  }
  return mine;
}

// Rows n ... n + kRows of W, the last row repeated beyond N.
template <class Format, int kRows>
METAL_FUNC void find_rows(device const uchar* weight, constant KernelArgs& args, uint n,
                          thread typename Format::Row (&rows)[kRows]) {
  MM_UNROLL
  for (int r = 0; r < kRows; ++r) rows[r] = weight_row<Format>(weight, args, n + r);
}

// Lane r stores row n + r.
template <int kRows, class T>
METAL_FUNC void store_rows(Result<T> result, constant KernelArgs& args, uint part, uint m, uint n,
                           uint lane, float value) {
  if (lane < uint(kRows) && (!has_n_tail() || n + lane < args.n)) {
    store_result(result, args, part, m, n + lane, value);
  }
}

}  // namespace metalmm
