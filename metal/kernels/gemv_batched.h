// y[m, n] = x[m, :] . W[n, :] for up to kBatchPerPass rows of x, each as gemv computes it, to the
// bit.
//
// Owner    a simdgroup owns kRows rows of W and fc_batch rows of x.
// Traffic  every byte of W once per fc_batch rows of x, decoded once; x once per simdgroup and
//          kTogether rows of W.
// Needs    threadgroup memory for the codebook; registers for kBatchPerPass * kRows sums and the
//          codes of kTogether rows.
#pragma once

#include "gemv_core.h"

namespace metalmm {

template <class Format, class T>
struct GemvBatch {
  MM_CONST int kRows = GemvBatched::kRows;
  // Rows decoded before x is read: more rows read x less often and need more registers.
  MM_CONST int kTogether = Format::kValues <= 16 ? kRows : Format::kValues <= 32 ? 2 : 1;

  using XRow = typename PlainX<T>::Row;

  using Cursor = typename Format::Cursor;

  // A unit of kRows rows of W and fc_batch rows of x.
  static METAL_FUNC void add_unit(thread const Cursor (&cursors)[kRows],
                                  thread const XRow (&xs)[kBatchPerPass], uint piece, Codebook book,
                                  thread float (&acc)[kBatchPerPass][kRows]) {
    typename Format::Raw raw[kRows];
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) Format::fetch(cursors[r], piece, raw[r]);
    MM_UNROLL
    for (int r0 = 0; r0 < kRows; r0 += kTogether) {
      Piece<Format> p[kTogether];
      MM_UNROLL
      for (int r = 0; r < kTogether; ++r) {
        Format::unpack(raw[r0 + r], piece, book, p[r]);
      }
      MM_UNROLL
      for (int m = 0; m < kBatchPerPass; ++m) {
        if (uint(m) < fc_batch) {
          XPiece<Format> x;
          load_piece<Format, PlainX<T>>(xs[m], x);
          MM_UNROLL
          for (int r = 0; r < kTogether; ++r) acc[m][r0 + r] = dot(p[r], x, acc[m][r0 + r]);
        }
      }
    }
  }

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    threadgroup half2* book = (threadgroup half2*)memory;
    fill<Format>(book, at.index, GemvBatched::kThreads);
    const uint n = at.tg.y * GemvBatched::kN + at.sg * kRows, m0 = at.tg.x * fc_batch;
    const uint part = at.tg.z;
    if (has_n_tail() && n >= args.n) return;
    typename Format::Row rows[kRows];
    find_rows<Format>(weight, args, n, rows);
    XRow xs[kBatchPerPass];
    MM_UNROLL
    for (int m = 0; m < kBatchPerPass; ++m) {
      xs[m] = uint(m) < fc_batch ? x_row(x, args, m0 + m) : x;
    }
    float acc[kBatchPerPass][kRows] = {};
    const KRange k = k_of_part(args, part);
    const Walk<Format> walk = Walk<Format>::of(k, at.lane, 0, 1);
    Cursor cursors[kRows];
    MM_UNROLL
    for (int r = 0; r < kRows; ++r) cursors[r] = Format::start(rows[r], walk.first);
    XRow at_x[kBatchPerPass];
    MM_UNROLL
    for (int m = 0; m < kBatchPerPass; ++m) at_x[m] = xs[m] + Walk<Format>::first_value(walk);
    for (uint unit = walk.first; unit < walk.end; unit += walk.step) {
      add_unit(cursors, at_x, walk.piece, book, acc);
      MM_UNROLL
      for (int r = 0; r < kRows; ++r) cursors[r] = Format::next(cursors[r], walk.step);
      MM_UNROLL
      for (int m = 0; m < kBatchPerPass; ++m) at_x[m] += walk.step * Walk<Format>::kUnit;
    }
    MM_UNROLL
    for (int m = 0; m < kBatchPerPass; ++m) {
      if (uint(m) < fc_batch) {
        add_tail<Format, kRows, PlainX<T>>(rows, xs[m], k, at.lane, acc[m]);
        const float sum = sum_rows(acc[m], at.lane);
        if (!has_m_tail() || m0 + m < args.m) {
          store_rows<kRows>(result, args, part, m0 + m, n, at.lane, sum);
        }
      }
    }
  }
};

}  // namespace metalmm
