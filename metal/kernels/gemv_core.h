// The parts that the gemv strategies share: sources of x, the walk of a simdgroup along its rows,
// the sum over lanes. Every strategy that walks here adds in the same order, so their results are
// equal bit for bit as long as one simdgroup owns all of K.
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../formats/piece.h"
#include "../layer/activation.h"
#include "../layer/norm.h"
#include "../tile/load.h"
#include "epilogue.h"

namespace metalmm {

using namespace metal;

// kCount neighbours of a row, in loads of up to 16 bytes where alignment is known.
template <int kCount, class T>
METAL_FUNC void load_values(device const T* p, thread float (&v)[kCount]) {
  constexpr int kBytes = kCount * sizeof(T) % 16 == 0 ? 16 : 8, kVector = kBytes / sizeof(T);
  static_assert(kCount % kVector == 0, "whole vectors");
  MM_UNROLL
  for (int i = 0; i < kCount; i += kVector) {
    device const uchar* from = reinterpret_cast<device const uchar*>(p + i);
    uint words[kBytes / 4];
    if constexpr (kBytes == 16) {
      const uint4 four = load_16_of<sizeof(T)>(from, x_is_aligned());
      MM_UNROLL
      for (int j = 0; j < 4; ++j) words[j] = four[j];
    } else {
      const uint2 two = load_8_of<sizeof(T)>(from, x_is_aligned());
      words[0] = two.x;
      words[1] = two.y;
    }
    MM_UNROLL
    for (int j = 0; j < kVector; ++j) {
      if constexpr (sizeof(T) == 4) {
        v[i + j] = as_type<float>(words[j]);
      } else {
        v[i + j] = float(as_type<vec<T, 2>>(words[j / 2])[j % 2]);
      }
    }
  }
}

// A source of x: where a lane is in a row, and the values there. `squares` grows by the squares of
// values that are to be normalised.

// x; where it has a norm g x, all of the norm but norm_scale(), which the sums are multiplied by.
template <class T>
struct NormX {
  struct Row {
    device const T* x;
    device const T* norm;
    float offset;
  };
  static METAL_FUNC Row row(Activations<T> from, constant KernelArgs& args, uint m) {
    return {x_row(from.x, args, m), from.norm, args.offset};
  }
  static METAL_FUNC Row at(Row row, uint k) { return {row.x + k, row.norm + k, row.offset}; }
  static METAL_FUNC float value(Row row, uint k, thread float& squares) {
    const float x = float(row.x[k]);
    if (has_norm()) squares = fma(x, x, squares);
    return norm_has_weight() ? x * norm_factor(float(row.norm[k]), row.offset) : x;
  }
  template <int kCount>
  static METAL_FUNC void load(Row row, uint k, thread float (&v)[kCount], thread float& squares) {
    load_values(row.x + k, v);
    if (has_norm()) squares = add_squares(v, squares);
    if (!norm_has_weight()) return;
    constexpr int kSome = kCount * sizeof(T) > 16 ? 16 / sizeof(T) : kCount;
    MM_UNROLL
    for (int i = 0; i < kCount; i += kSome) {  // one load each: few registers
      float weight[kSome];
      load_values(row.norm + k + i, weight);
      MM_UNROLL
      for (int j = 0; j < kSome; ++j) v[i + j] *= norm_factor(weight[j], row.offset);
    }
  }
};

// act(gate) * up, in f32.
template <class T>
struct ActMulX {
  struct Row {
    device const T* gate;
    device const T* up;
  };
  static METAL_FUNC Row at(Row x, uint k) { return {x.gate + k, x.up + k}; }
  static METAL_FUNC float value(Row x, uint k, thread float&) {
    return ActMul::of(float(x.gate[k]), float(x.up[k]));
  }
  template <int kCount>
  static METAL_FUNC void load(Row x, uint k, thread float (&v)[kCount], thread float&) {
    // In turns of one load each: `up` takes no more registers than one holds.
    constexpr int kSome = kCount * sizeof(T) > 16 ? 16 / sizeof(T) : kCount;
    MM_UNROLL
    for (int i = 0; i < kCount; i += kSome) {
      float gate[kSome], up[kSome];
      load_values(x.gate + k + i, gate);
      load_values(x.up + k + i, up);
      act_mul(gate, up, v + i);
    }
  }
};

// The values by which a lane multiplies its piece; x starts at the first of them.
template <class Format, class Source, class Terms>
METAL_FUNC void load_piece(typename Source::Row x, thread XPiece<Format, Terms>& out,
                           thread float& squares) {
  using Pieces = typename Format::Pieces;
  MM_UNROLL
  for (int r = 0; r < Pieces::kValues / Pieces::kRun; ++r) {
    float run[Pieces::kRun];
    Source::load(x, r * Pieces::kRunStride, run, squares);
    MM_UNROLL
    for (int i = 0; i < Pieces::kRun; ++i) out.x[r * Pieces::kRun + i] = run[i];
  }
  sum_for_offsets(out);
}

// The units of K that a lane visits: every stride-th from `first`, below `end`.
template <class Format>
struct Walk {
  using Pieces = typename Format::Pieces;
  MM_CONST uint kUnit = Pieces::kLanes * Pieces::kValues;
  uint first, end, stride, piece;

  // Lanes next to each other own pieces next to each other; `sg` of `simdgroups` share the range.
  static METAL_FUNC Walk of(KRange k, uint lane, uint sg, uint simdgroups) {
    constexpr uint kUnits = kSimdWidth / Pieces::kLanes;
    return {k.begin / kUnit + sg * kUnits + lane / Pieces::kLanes, k.end / kUnit,
            simdgroups * kUnits, lane % Pieces::kLanes};
  }
  // The first value of K that the lane owns.
  static METAL_FUNC uint first_value(Walk w) { return w.first * kUnit + Pieces::first(w.piece); }
};

// kRows neighbours of W: the first, and the distances of all from it. Where rows are packed these
// are constants, so that one address serves all of them.
template <class Format, int kRows>
struct Rows {
  Row first;
  long distance[kRows];

  // Rows n ... n + kRows, the last row repeated beyond N.
  static METAL_FUNC Rows of(device const uchar* weight, constant KernelArgs& args, long stride,
                            uint n) {
    Rows out;
    out.first = weight + long(n) * stride;
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      out.distance[r] = (has_n_tail() ? min(uint(r), args.n - 1 - n) : uint(r)) * stride;
    }
    return out;
  }
};

// A dense row may end within a unit: one value per lane.
template <class Format, int kSets, int kRows, class Source>
METAL_FUNC void add_tail(thread const Rows<Format, kRows> (&sets)[kSets], typename Source::Row x,
                         KRange k, uint lane, thread float (&acc)[kSets * kRows],
                         thread float& squares) {
  if constexpr (Format::Storage::kBlockValues == 1) {
    constexpr uint kValues = Format::Pieces::kValues;
    const uint at = k.end / kValues * kValues + lane;
    if (at < k.end) {
      const float value = Source::value(x, at, squares);
      MM_UNROLL
      for (int r = 0; r < kSets * kRows; ++r) {
        thread const Rows<Format, kRows>& rows = sets[r / kRows];
        const float w = Format::value(rows.first + rows.distance[r % kRows], at);
        acc[r] = fma(w, value, acc[r]);
      }
    }
  }
}

// The number of rows that a lane loads before it waits. An Apple GPU holds the more simdgroups, the
// fewer half registers one takes: with pieces of 32 values q5_k takes 128 for one row at a time
// (832 threads a core), 184 for four (576); 832 threads have 15 KB of q4_k on their way, 12 GB/s of
// a core for a latency of 1.2 us. MM_ALL_ROWS_AT_ONCE, a target of the stand-in: one wait for each
// step.
template <class Format, int rows>
struct RowsAtOnce {
#if defined(MM_ALL_ROWS_AT_ONCE)
  MM_CONST int kCount = rows;
#else
  MM_CONST int kCount = Format::Pieces::kValues <= 16 ? (rows < 4 ? rows : 4) : 1;
#endif
};

// kCount rows of all sets from `first` on; the cursor of a set moves on with its last.
template <class Format, int kSets, int kRows, int kCount>
METAL_FUNC void fetch_rows(thread const Rows<Format, kRows> (&sets)[kSets], Walk<Format> walk,
                           int first, thread typename Format::Storage::Cursor (&cursors)[kSets],
                           thread typename Format::Raw (&raw)[kCount]) {
  using Storage = typename Format::Storage;
  MM_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const int g = kSets == 1 ? 0 : (first + i) / kRows, r = (first + i) % kRows;
    Format::fetch(Storage::moved(cursors[g], sets[g].distance[r]), walk.piece, raw[i]);
    if (r == kRows - 1) cursors[g] = Storage::next(cursors[g], walk.stride);
  }
}

// acc[r] += the lane's share of row r times x, for the rows of all kSets in turn; squares += that
// of the squares of x.
template <class Format, class Terms, int kSets, int kRows, class Source>
METAL_FUNC void accumulate_of(thread const Rows<Format, kRows> (&sets)[kSets],
                              typename Source::Row x, KRange k, uint lane, uint sg, uint simdgroups,
                              Codebook book, thread float (&acc)[kSets * kRows],
                              thread float& squares) {
  using Storage = typename Format::Storage;
  constexpr int kAtOnce = RowsAtOnce<Format, kSets * kRows>::kCount;
  static_assert(kSets * kRows % kAtOnce == 0, "rows beyond the last would be loaded");
  const Walk<Format> walk = Walk<Format>::of(k, lane, sg, simdgroups);
  typename Storage::Cursor cursors[kSets];
  MM_UNROLL
  for (int g = 0; g < kSets; ++g) {
    cursors[g] = Storage::start(sets[g].first, walk.first, walk.piece);
  }
  typename Source::Row x_at = Source::at(x, Walk<Format>::first_value(walk));
  for (uint unit = walk.first; unit < walk.end; unit += walk.stride) {
    typename Format::Raw raw[kAtOnce];
    fetch_rows<Format>(sets, walk, 0, cursors, raw);
    XPiece<Format, Terms> xs;
    load_piece<Format, Source>(x_at, xs, squares);
    x_at = Source::at(x_at, walk.stride * Walk<Format>::kUnit);
    MM_UNROLL
    for (int r = 0; r < kSets * kRows; ++r) {
      if (r > 0 && r % kAtOnce == 0) fetch_rows<Format>(sets, walk, r, cursors, raw);
      Piece<Format, Terms> p;
      Format::unpack(raw[r % kAtOnce], walk.piece, book, p);
      acc[r] = dot(p, xs, acc[r]);
    }
  }
  if (sg == 0) add_tail<Format, kSets, kRows, Source>(sets, x, k, lane, acc, squares);
}

template <class Format, int kSets, int kRows, class Source>
METAL_FUNC void accumulate(thread const Rows<Format, kRows> (&sets)[kSets], typename Source::Row x,
                           KRange k, uint lane, uint sg, uint simdgroups, Codebook book,
                           thread float (&acc)[kSets * kRows], thread float& squares) {
  using Form = FormOf<Format>;
  if (Form::takes_subnormals()) {
    accumulate_of<Format, typename Form::Subnormal, kSets, kRows, Source>(
        sets, x, k, lane, sg, simdgroups, book, acc, squares);
  } else {
    accumulate_of<Format, typename Format::Terms, kSets, kRows, Source>(
        sets, x, k, lane, sg, simdgroups, book, acc, squares);
  }
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

// `sum` of a row of x whose squares the lanes hold, normalised.
METAL_FUNC float normalised(float sum, float squares, constant KernelArgs& args) {
  return has_norm() ? sum * norm_scale(simd_sum(squares), args.eps) : sum;
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
