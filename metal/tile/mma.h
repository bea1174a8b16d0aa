// Multiplication of 8 x 8 matrices by a simdgroup, and which lane holds what of one.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "../entry.h"

namespace metalmm {

using namespace metal;

// A lane holds two neighbours of a row: thread_elements()[i] is [row][column + i].
//
//     column  0  1  2  3  4  5  6  7
//     row 0   0  0  1  1  8  8  9  9    lane
//     row 1   2  2  3  3 10 10 11 11
//     row 2   4  4  5  5 12 12 13 13
//     row 3   6  6  7  7 14 14 15 15
//     row 4  16 16 17 17 24 24 25 25   and so on to row 7
METAL_FUNC uint fragment_row(uint lane) { return (lane / 2) % 4 + (lane / 16) * 4; }
METAL_FUNC uint fragment_column(uint lane) { return (lane % 2) * 2 + ((lane / 8) % 2) * 4; }

// The matrix of which every lane has two elements in registers.
template <class E>
METAL_FUNC simdgroup_matrix<E, kFragment, kFragment> fragment_of(vec<E, 2> elements) {
  simdgroup_matrix<E, kFragment, kFragment> out;
  out.thread_elements()[0] = elements.x;
  out.thread_elements()[1] = elements.y;
  return out;
}

// acc[i][j] += rows [8 i, 8 i + 8) of A * rows [8 j, 8 j + 8) of B, transposed.
// 8 values of K take kA + kB loads for kA * kB multiplications. A lane reads its two elements
// of A as neighbours, those of B from two rows.
template <int kK, int kA, int kB, class E>
METAL_FUNC void multiply(threadgroup const E* a, threadgroup const E* b,
                         thread simdgroup_float8x8 (&acc)[kA][kB]) {
  constexpr int kStride = kK + kOperandPad;
  MM_UNROLL
  for (int k = 0; k < kK; k += kFragment) {
    simdgroup_matrix<E, kFragment, kFragment> a_rows[kA], b_columns;
    MM_UNROLL
    for (int i = 0; i < kA; ++i) {
      simdgroup_load(a_rows[i], a + i * kFragment * kStride + k, kStride);
    }
    MM_UNROLL
    for (int j = 0; j < kB; ++j) {
      simdgroup_load(b_columns, b + j * kFragment * kStride + k, kStride, ulong2(0), true);
      MM_UNROLL
      for (int i = 0; i < kA; ++i) {
        simdgroup_multiply_accumulate(acc[i][j], a_rows[i], b_columns, acc[i][j]);
      }
    }
  }
}

template <int kA, int kB>
METAL_FUNC void clear(thread simdgroup_float8x8 (&acc)[kA][kB]) {
  MM_UNROLL
  for (int i = 0; i < kA; ++i) {
    MM_UNROLL
    for (int j = 0; j < kB; ++j)
      acc[i][j] = make_filled_simdgroup_matrix<float, kFragment, kFragment>(0.0f);
  }
}

}  // namespace metalmm
