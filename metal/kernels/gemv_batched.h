// y[m, n] = x[m, :] . W[n, :] for up to kBatchPerPass rows of x, each as gemv computes it, to the
// bit.
//
// Owner    a simdgroup owns GemvBatched::kRows rows of W and fc_batch rows of x; it walks all of K
//          for kRows of them at a time, or for all of them where x stays in registers (keeps_x()).
// Traffic  every byte of W once per fc_batch rows of x, decoded once; x once per simdgroup and
//          as many rows of W as are walked together. Floats that lanes read 64 bytes apart touch
//          16 lines of 128 bytes a load; in the order of the lanes (arrange_x) 4.
// Needs    threadgroup memory for the codebook; registers for kBatchPerPass * kRows sums and the
//          codes of kRows rows.
//
// Norm     as gemv; each walk sums the squares again, and for every row of x they cost an issue
//          cycle over kRows a weight, g as much.
//
// Rejected: one walk for all rows, kRows of them decoded at a time: compilers then keep x of all
// rows of x for the next rows of W (clang for sm_90, q4_k, 8 rows of x: 7.9 KB of spills a lane).
// bench/h200-notes.md has what else was tried for several rows.
#pragma once

#include "gemv_core.h"

namespace metalmm {

template <class Format, class T>
struct GemvBatch {
  MM_CONST int kRows = batched_rows(Format::Pieces::kValues);
  MM_CONST int kPass = batched_pass(Format::Pieces::kValues), kAll = GemvBatched::kRows;
  MM_CONST int kVector = 16 / sizeof(T);
  static_assert(kAll % kRows == 0, "walks of equal size");

  using Storage = typename Format::Storage;
  using Source = NormX<T>;
  using XRow = typename Source::Row;

  // Whether pieces of so many rows of x stay in registers while all rows of W are decoded one by
  // one: x is loaded, and summed for offsets, half as often as where two rows of W are decoded
  // before x. M1, M = 2: affine4 4.16 to 3.51 cycles a weight, q4_k 5.14 to 4.44; H200, 14336 x
  // 4096: 27.3 to 19.3, 28.2 to 23.2 us. Pieces of 32 values of more rows are over the registers.
  static METAL_FUNC bool keeps_x() { return kRows < kAll && fc_batch == uint(kKeptRows); }

  // `count` rows of x, one after the other: their addresses in a chain, in the registers of one.
  struct XRows {
    XRow first;
    long stride;
    uint count;
  };

  // Whether there is a row m. A comparison with a count that no constant bounds leaves a branch in
  // front of each row's loads: H200, q4_0, 14336 x 4096, M = 2, 8: 24.0 and 49.4 us; so 19.4, 39.9.
  static METAL_FUNC bool has_row(int m, XRows xs) {
    return uint(m) < fc_batch && (!has_m_tail() || uint(m) < xs.count);
  }

  // A lane's piece of x from where it begins.
  template <class Terms>
  static METAL_FUNC void load(XRow row, thread XPiece<Format, Terms>& x, thread float& squares) {
    if (!x_is_arranged()) {
      load_piece<Format, Source>(row, x, squares);
      return;
    }
    MM_UNROLL
    for (int i = 0; i < Format::Pieces::kValues; i += kVector) {
      float values[kVector];
      load_values(row.x + i * kSimdWidth, values);
      MM_UNROLL
      for (int j = 0; j < kVector; ++j) x.x[i + j] = values[j];
    }
    sum_for_offsets(x);
  }

  // acc[m][r] += the lane's share of row r of W times row m of x, squares[m] that of its squares.
  template <class Terms, int kCount>
  static METAL_FUNC void walk(thread const Rows<Format, kCount> (&set)[1], XRows xs, KRange k,
                              uint lane, Codebook book, thread float (&acc)[kPass][kCount],
                              thread float (&squares)[kPass]) {
    thread const Rows<Format, kCount>& rows = set[0];
    const Walk<Format> w = Walk<Format>::of(k, lane, 0, 1);
    typename Storage::Cursor cursor = Storage::start(rows.first, w.first, w.piece);
    const uint first_x = x_is_arranged() ? lane * kVector : Walk<Format>::first_value(w);
    XRow x_at = Source::at(xs.first, first_x);
    for (uint unit = w.first; unit < w.end; unit += w.stride) {
      typename Format::Raw raw[kCount];
      MM_UNROLL
      for (int r = 0; r < kCount; ++r) {
        Format::fetch(Storage::moved(cursor, rows.distance[r]), w.piece, raw[r]);
      }
      cursor = Storage::next(cursor, w.stride);
      XRow row = x_at;
      if constexpr (kCount > kRows) {  // keeps_x()
        XPiece<Format, Terms> x[kKeptRows];
        MM_UNROLL
        for (int m = 0; m < kKeptRows; ++m) {
          load(row, x[m], squares[m]);
          if (has_row(m + 1, xs)) row.x += xs.stride;  // else the last row again
        }
        MM_UNROLL
        for (int r = 0; r < kCount; ++r) {
          Piece<Format, Terms> p;
          Format::unpack(raw[r], w.piece, book, p);
          MM_UNROLL
          for (int m = 0; m < kKeptRows; ++m) acc[m][r] = dot(p, x[m], acc[m][r]);
        }
      } else {
        Piece<Format, Terms> p[kCount];
        MM_UNROLL
        for (int r = 0; r < kCount; ++r) Format::unpack(raw[r], w.piece, book, p[r]);
        MM_UNROLL
        for (int m = 0; m < kPass; ++m) {
          if (has_row(m, xs)) {
            XPiece<Format, Terms> x;
            load(row, x, squares[m]);
            row.x += xs.stride;
            MM_UNROLL
            for (int r = 0; r < kCount; ++r) acc[m][r] = dot(p[r], x, acc[m][r]);
          }
        }
      }
      x_at = Source::at(x_at, w.stride * Walk<Format>::kUnit);
    }
    XRow row = xs.first;
    MM_UNROLL
    for (int m = 0; m < kPass; ++m) {
      if (has_row(m, xs)) {
        add_tail<Format, 1, kCount, Source>(set, row, k, lane, acc[m], squares[m]);
        row.x += xs.stride;
      }
    }
  }

  static METAL_FUNC void run(Activations<T> x, device const T* arranged, device const uchar* weight,
                             Result<T> result, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    if (x_is_arranged()) x.x = arranged;
    threadgroup half2* book = reinterpret_cast<threadgroup half2*>(memory);
    fill<Format>(book, at.index, GemvBatched::kThreads);
    const uint first = at.tg.y * GemvBatched::kN + at.sg * kAll;
    const uint m0 = at.tg.x * fc_batch;
    const XRows xs = {Source::row(x, args, m0), args.x_stride, args.m - m0};
    if (keeps_x()) {
      products<kAll>(xs, weight, result, args, book, first, m0, at);
      return;
    }
    for (uint n = first; n < first + kAll; n += kRows) {
      products<kRows>(xs, weight, result, args, book, n, m0, at);
    }
  }

  // Rows n ... n + kCount of W, all of K.
  template <int kCount>
  static METAL_FUNC void products(XRows xs, device const uchar* weight, Result<T> result,
                                  constant KernelArgs& args, Codebook book, uint n, uint m0,
                                  Position at) {
    if (has_n_tail() && n >= args.n) return;
    const uint part = at.tg.z;
    const Rows<Format, kCount> rows[1] = {
        Rows<Format, kCount>::of(weight, args, weight_stride<Format>(args.w_stride), n)};
    float acc[kPass][kCount] = {}, squares[kPass] = {};
    const KRange k = k_of_part(args, part);
    using Form = FormOf<Format>;
    if (Form::takes_subnormals()) {
      walk<typename Form::Subnormal>(rows, xs, k, at.lane, book, acc, squares);
    } else {
      walk<typename Format::Terms>(rows, xs, k, at.lane, book, acc, squares);
    }
    MM_UNROLL
    for (int m = 0; m < kPass; ++m) {
      if (has_row(m, xs)) {
        const float sum = normalised(sum_rows(acc[m], at.lane), squares[m], args);
        store_rows<kCount>(result, args, part, m0 + m, n, at.lane, sum);
      }
    }
  }
};

}  // namespace metalmm

// run({x, norm}, arranged, weight, ...), as MM_GEMV and MM_ARRANGED (entry.h).
#define MM_GEMV_ARRANGED(dtype, T, strategy, format, Struct, Kernel)                            \
  MM_KERNEL(strategy##_##format##_##dtype,                                                      \
            (MM_IN(T, x, kSlotX), MM_IN(T, norm, kSlotNorm), MM_IN(T, arranged, kSlotY2),       \
             MM_IN(uchar, weight, kSlotWeight), MM_RESULT(T)),                                  \
            metalmm::Kernel<metalmm::Struct, T>::run({x, norm}, arranged, weight, {y, bias, c}, \
                                                     args, memory, at))
