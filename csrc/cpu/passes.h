// How kernels for few rows of x walk over W.
#pragma once

#include "simd.h"

namespace metalmm::cpu::MM_ISA {

// Fetches the codes of a stream of rows ahead. Where they are a plane, what lies behind it in a row
// is not of the stream: fetch_planes() fetches that.
template <class Codec>
struct Stream {
  int64_t end, rest;
  MM_INLINE explicit Stream(const Weight& w)
      : end(w.layout.scales_offset), rest(w.row_stride - w.layout.scales_offset) {}
  // `ahead` of a block of so many bytes.
  MM_INLINE void fetch(const uint8_t* row, int64_t block, int bytes, int ahead) const {
    for (int i = 0; i < bytes; i += 64) {
      const int64_t at = block * bytes + i + ahead;
      __builtin_prefetch(row + at + (Codec::kHasPlanes && at >= end ? rest : 0));
    }
  }
};

// The scales and biases of the row behind, of a format that has them in planes: they lie apart from
// what is read in order, and each line of them serves 1024 values or more. One thread, cold
// affine4_g64, int8 (Zen 4): 5.9 cycles a chunk without.
template <class Codec>
MM_INLINE void fetch_planes(const Weight& w, const uint8_t* row) {
  if constexpr (!Codec::kHasPlanes) return;
  for (int64_t at = w.layout.scales_offset; at < w.row_stride; at += 64) {
    __builtin_prefetch(row + w.row_stride + at);
  }
}

MM_INLINE float total(const F* sums, int m) { return sum(sums[m]); }

// All rows of W by passes of kRows, whose rows lie a kRows-th of the range apart; those beyond
// last_row read the last row and are not stored. Sums: what is summed up for a row of W, of which
// total() makes the results.
template <class Codec, class Kernel, class Sums, int kRows, int kM, class Args>
MM_INLINE void run_passes(const Args& a) {
  const int64_t n_rows = a.last_row - a.first_row, passes = ceil_div(n_rows, kRows);
  for (int64_t i = 0; i < passes; ++i) {
    const uint8_t* p[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int64_t n = i + r * passes;
      p[r] = a.weight.row(a.first_row + (n < n_rows ? n : n_rows - 1));
      fetch_planes<Codec>(a.weight, p[r]);
    }
    Sums sums[kRows] = {};
    Kernel::multiply_rows(a, p, sums);
    for (int r = 0; r < kRows && i + r * passes < n_rows; ++r) {
      for (int m = 0; m < kM; ++m) a.y[m * a.y_stride + i + r * passes] = total(sums[r], m);
    }
  }
}

}  // namespace metalmm::cpu::MM_ISA
