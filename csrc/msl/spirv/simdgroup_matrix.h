// <metal_simdgroup_matrix> for counting instructions, not for results: a lane loads and stores what
// a lane of an Apple GPU does (two neighbours at once, or two values that lie apart), and a product
// of two matrices is one place in the code: counted::product() of the target. The product of SPIR-V
// is two multiply-adds, for no compiler but Apple's has an instruction for the product.
#pragma once

#include "simd.h"

namespace metal {

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  METAL_FUNC thread vec<T, 2>& thread_elements() { return elements; }
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

namespace counted {

METAL_FUNC ulong row() { return warp::lane() / 2 % 4 + warp::lane() / 16 * 4; }
METAL_FUNC ulong column() { return warp::lane() % 2 * 2 + warp::lane() / 8 % 2 * 4; }

template <class A, class B>
METAL_FUNC vec<float, 2> product(vec<A, 2> a, vec<B, 2> b, vec<float, 2> c) {
  c.x = fma(static_cast<float>(a.x), static_cast<float>(b.x), c.x);
  c.y = fma(static_cast<float>(a.y), static_cast<float>(b.y), c.y);
  return c;
}

}  // namespace counted

#define MM_COUNTED_MEMORY(space)                                                              \
  template <class T, class Stride = ulong>                                                    \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p,       \
                                 Stride stride = 8, ulong2 origin = ulong2{0, 0},             \
                                 bool transposed = false) {                                   \
    const ulong step = static_cast<ulong>(stride);                                            \
    p += origin.y * step + origin.x;                                                          \
    if (transposed) {                                                                         \
      m.elements.x = p[counted::column() * step + counted::row()];                            \
      m.elements.y = p[(counted::column() + 1) * step + counted::row()];                      \
    } else {                                                                                  \
      p += counted::row() * step + counted::column();                                         \
      m.elements = *reinterpret_cast<const space vec<T, 2>*>(p);                              \
    }                                                                                         \
  }                                                                                           \
  template <class T, class Stride = ulong>                                                    \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* p, Stride stride = 8, \
                                  ulong2 origin = ulong2{0, 0}, bool transposed = false) {    \
    const ulong step = static_cast<ulong>(stride);                                            \
    p += origin.y * step + origin.x + counted::row() * step + counted::column();              \
    p[0] = m.elements.x;                                                                      \
    p[transposed ? step : 1] = m.elements.y;                                                  \
  }
MM_COUNTED_MEMORY(device)
MM_COUNTED_MEMORY(threadgroup)
#undef MM_COUNTED_MEMORY

template <class A, class B>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<float, 8, 8> c) {
  d.elements = counted::product(a.elements, b.elements, c.elements);
}

}  // namespace metal
