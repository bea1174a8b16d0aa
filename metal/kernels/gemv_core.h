// What the gemv strategies share: sources of x, the walk of a simdgroup along its rows, the sum
// over lanes. Every strategy that walks here adds in the same order, so their results are equal bit
// for bit as long as one simdgroup owns all of K.
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../formats/piece.h"
#include "../tile/load.h"
#include "epilogue.h"

namespace metalmm {

using namespace metal;

// kCount neighbours of a row, in loads of up to 16 bytes where alignment is known.
template <int kCount, class T>
METAL_FUNC void load_values(device const T* p, thread float (&v)[kCount]) {
  if (x_is_aligned()) {
    load_vectors(p, v);
    return;
  }
  MM_UNROLL
  for (int i = 0; i < kCount; ++i) v[i] = float(p[i]);
}

// x as it is.
template <class T>
struct PlainX {
  using Row = device const T*;
  static METAL_FUNC Row at(Row x, uint k) { return x + k; }
  static METAL_FUNC float value(Row x, uint k) { return float(x[k]); }
  template <int kCount>
  static METAL_FUNC void load(Row x, uint k, thread float (&v)[kCount]) {
    load_values(x + k, v);
  }
};

METAL_FUNC float silu(float x) { return x / (1.0f + exp(-x)); }

// silu(gate) * up, in f32.
template <class T>
struct SiluMulX {
  struct Row {
    device const T* gate;
    device const T* up;
  };
  static METAL_FUNC Row at(Row x, uint k) { return {x.gate + k, x.up + k}; }
  static METAL_FUNC float value(Row x, uint k) { return silu(float(x.gate[k])) * float(x.up[k]); }
  template <int kCount>
  static METAL_FUNC void load(Row x, uint k, thread float (&v)[kCount]) {
    float up[kCount];
    load_values(x.gate + k, v);
    load_values(x.up + k, up);
    MM_UNROLL
    for (int i = 0; i < kCount; ++i) v[i] = silu(v[i]) * up[i];
  }
};

// What a lane multiplies its piece by; x starts at the first value of it.
template <class Format, class Source>
METAL_FUNC void load_piece(typename Source::Row x, thread XPiece<Format>& out) {
  MM_UNROLL
  for (int r = 0; r < Format::kValues / Format::kRun; ++r) {
    float run[Format::kRun];
    Source::load(x, r * Format::kRunStride, run);
    MM_UNROLL
    for (int i = 0; i < Format::kRun; ++i) out.x[r * Format::kRun + i] = run[i];
  }
  sum_segments(out);
}

// The units of K that a lane visits: every step-th from `first`, of those below `end`.
template <class Format>
struct Walk {
  MM_CONST uint kUnit = Format::kLanes * Format::kValues;
  uint first, end, step, piece;

  // Lanes next to each other own pieces next to each other; `sg` of `simdgroups` share the range.
  static METAL_FUNC Walk of(KRange k, uint lane, uint sg, uint simdgroups) {
    constexpr uint kUnits = kSimdWidth / Format::kLanes;
    return {k.begin / kUnit + sg * kUnits + lane / Format::kLanes, k.end / kUnit,
            simdgroups * kUnits, lane % Format::kLanes};
  }
  // The first value of K that the lane owns.
  METAL_FUNC static uint first_value(Walk w) { return w.first * kUnit + Format::first(w.piece); }
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

// acc[r] += the lane's share of row r times x. The loads of all rows come first: one wait a step,
// not one a row. Pointers advance by constants, so that a row costs one addition a step.
template <class Format, int kRows, class Source>
METAL_FUNC void accumulate(thread const typename Format::Row (&rows)[kRows], typename Source::Row x,
                           KRange k, uint lane, uint sg, uint simdgroups, Codebook book,
                           thread float (&acc)[kRows]) {
  const Walk<Format> walk = Walk<Format>::of(k, lane, sg, simdgroups);
  typename Format::Cursor cursors[kRows];
  MM_UNROLL
  for (int r = 0; r < kRows; ++r) cursors[r] = Format::start(rows[r], walk.first);
  typename Source::Row x_at = Source::at(x, Walk<Format>::first_value(walk));
  for (uint unit = walk.first; unit < walk.end; unit += walk.step) {
    typename Format::Raw raw[kRows];
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Format::fetch(cursors[r], walk.piece, raw[r]);
      cursors[r] = Format::next(cursors[r], walk.step);
    }
    XPiece<Format> xs;
    load_piece<Format, Source>(x_at, xs);
    x_at = Source::at(x_at, walk.step * Walk<Format>::kUnit);
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Piece<Format> p;
      Format::unpack(raw[r], walk.piece, book, p);
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
