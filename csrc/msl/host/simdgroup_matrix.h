// <metal_simdgroup_matrix>: 8 x 8 matrices whose 64 elements lie in 32 lanes, two each.
#pragma once

#include "simd.h"

namespace metal {
namespace emulator {

// The place of the two elements of lane `lane`: row, and the column of the first.
METAL_FUNC constexpr uint matrix_row(uint lane) { return lane / 2 % 4 + lane / 16 * 4; }
METAL_FUNC constexpr uint matrix_column(uint lane) { return lane % 2 * 2 + lane / 8 % 2 * 4; }

template <class A, class B, class C>
struct MultiplyAdd {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};

// D = A · B + C, products and sums in f32 in the order of k, rounded once to D.
template <class D, class A, class B, class C>
void multiply_add(void* const* in, void* const* out) {
  using Row = vec<float, 8>;
  float a[8][8];
  Row b[8], sum[8];
  for (uint i = 0; i < kMmScopeSimd; ++i) {
    auto lane = static_cast<MultiplyAdd<A, B, C>*>(in[i]);
    uint row = matrix_row(i), column = matrix_column(i);
    for (uint e = 0; e < 2; ++e) {
      a[row][column + e] = lane ? static_cast<float>(lane->a[e]) : __builtin_nanf("");
      b[row][column + e] = lane ? static_cast<float>(lane->b[e]) : __builtin_nanf("");
      sum[row][column + e] = lane ? static_cast<float>(lane->c[e]) : __builtin_nanf("");
    }
  }
  for (uint row = 0; row < 8; ++row) {
    for (uint k = 0; k < 8; ++k) {
      sum[row] = __builtin_elementwise_fma(Row(a[row][k]), b[k], sum[row]);
    }
  }
  for (uint i = 0; i < kMmScopeSimd; ++i) {
    if (out[i]) {
      auto lane = static_cast<vec<D, 2>*>(out[i]);
      for (uint e = 0; e < 2; ++e) {
        (*lane)[e] = static_cast<D>(sum[matrix_row(i)][matrix_column(i) + e]);
      }
    }
  }
}

}  // namespace emulator

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "Metal has 8 x 8 simdgroup matrices only");
  static_assert(is_floating_point_v<T>, "simdgroup matrices are of half, bfloat or float");
  using element_type = T;
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint lane = mm_lane();
    for (uint e = 0; e < 2; ++e) {
      bool on = emulator::matrix_row(lane) == emulator::matrix_column(lane) + e;
      elements[e] = on ? diagonal : static_cast<T>(0);
    }
  }
  thread vec<T, 2>& thread_elements() { return elements; }
  const thread vec<T, 2>& thread_elements() const { return elements; }
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = static_cast<vec<T, 2>>(value);
  return m;
}
template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

// Element (row, column) of m is at p[(origin.y + row) * stride + origin.x + column], transposed
// with row and column exchanged.
#define MM_MATRIX_MEMORY(space)                                                              \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p,      \
                                 ulong stride = 8, ulong2 origin = ulong2{0, 0},             \
                                 bool transposed = false, MM_SITE) {                         \
    emulator::checkpoint("simdgroup_load", file, line);                                      \
    emulator::site(file, line);                                                              \
    uint lane = mm_lane();                                                                   \
    ulong row = emulator::matrix_row(lane), column = emulator::matrix_column(lane);          \
    for (ulong e = 0; e < 2; ++e) {                                                          \
      ulong y = transposed ? column + e : row, x = transposed ? row : column + e;            \
      m.elements[e] = p[(origin.y + y) * stride + origin.x + x];                             \
    }                                                                                        \
    emulator::site(nullptr, 0);                                                              \
  }                                                                                          \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* p, ulong stride = 8, \
                                  ulong2 origin = ulong2{0, 0}, bool transposed = false,     \
                                  MM_SITE) {                                                 \
    emulator::checkpoint("simdgroup_store", file, line);                                     \
    emulator::site(file, line);                                                              \
    uint lane = mm_lane();                                                                   \
    ulong row = emulator::matrix_row(lane), column = emulator::matrix_column(lane);          \
    for (ulong e = 0; e < 2; ++e) {                                                          \
      ulong y = transposed ? column + e : row, x = transposed ? row : column + e;            \
      p[(origin.y + y) * stride + origin.x + x] = m.elements[e];                             \
    }                                                                                        \
    emulator::site(nullptr, 0);                                                              \
  }
MM_MATRIX_MEMORY(device)
MM_MATRIX_MEMORY(threadgroup)
#undef MM_MATRIX_MEMORY

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<C, 8, 8> c, MM_SITE) {
  emulator::MultiplyAdd<A, B, C> in{a.elements, b.elements, c.elements};
  mm_collective(kMmScopeSimd, "simdgroup_multiply_accumulate", 0, file, line,
                emulator::multiply_add<D, A, B, C>, &in, &d.elements);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, MM_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(static_cast<D>(0)),
                                file, line);
}
template <class A, class B>
METAL_FUNC simdgroup_matrix<A, 8, 8> operator*(simdgroup_matrix<A, 8, 8> a,
                                               simdgroup_matrix<B, 8, 8> b) {
  simdgroup_matrix<A, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal

// The name that shaders which store matrices by themselves call: elements 0 and 1 of each vector
// are the lane's.
template <class A, class B, class C, class D>
METAL_FUNC D __metal_simdgroup_matrix_8x8_multiply_accumulate(A a, B b, C c, D, MM_SITE) {
  using namespace metal;
  emulator::MultiplyAdd<element_t<A>, element_t<B>, element_t<C>> in{a.xy, b.xy, c.xy};
  D d = c;
  vec<element_t<D>, 2> out;
  mm_collective(kMmScopeSimd, "simdgroup_multiply_accumulate", 0, file, line,
                emulator::multiply_add<element_t<D>, element_t<A>, element_t<B>, element_t<C>>, &in,
                &out);
  d[0] = out[0];
  d[1] = out[1];
  return d;
}
