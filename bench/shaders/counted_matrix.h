// <metal_simdgroup_matrix> for counting: a product of 8 x 8 matrices is one instruction of PTX that
// no assembler knows, a load what a lane of an Apple GPU reads: two neighbours at once, or two
// values that lie apart.
#pragma once

#include <metal_stdlib>

#include "library/array.h"
#include "library/integer.h"
#include "library/matrix.h"
#include "library/pack.h"

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

// Operands of 16 bits are a register each, of 32 bits two.
template <class A, class B>
METAL_FUNC vec<float, 2> product(vec<A, 2> a, vec<B, 2> b, vec<float, 2> c) {
  if constexpr (sizeof(A) == 2 && sizeof(B) == 2) {
    asm("simdgroup_product.b16 {%0,%1}, %2, %3;"
        : "+f"(c.x), "+f"(c.y)
        : "r"(as_type<uint>(a)), "r"(as_type<uint>(b)));
  } else {
    const auto left = construct<vec<float, 2>>(a), right = construct<vec<float, 2>>(b);
    asm("simdgroup_product.b32 {%0,%1}, {%2,%3}, {%4,%5};"
        : "+f"(c.x), "+f"(c.y)
        : "f"(left.x), "f"(left.y), "f"(right.x), "f"(right.y));
  }
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

// What a translated text calls where C++ neither reads nor assigns in another address space: in
// words as long as the size allows, whatever alignment the type has.
namespace emulator {

template <uint size>
using Word = conditional_t<
    size % 16 == 0, vec<uint, 4>,
    conditional_t<size % 8 == 0, vec<uint, 2>, conditional_t<size % 4 == 0, uint, uchar>>>;
#define MM_COUNTED_STRUCTS(space)                            \
  template <class T, class W = Word<sizeof(T)>>              \
  METAL_FUNC T load(const space T& from) {                   \
    W words[sizeof(T) / sizeof(W)];                          \
    for (uint i = 0; i < sizeof(T) / sizeof(W); ++i) {       \
      words[i] = reinterpret_cast<const space W*>(&from)[i]; \
    }                                                        \
    T to;                                                    \
    __builtin_memcpy(&to, words, sizeof(T));                 \
    return to;                                               \
  }                                                          \
  template <class T, class W = Word<sizeof(T)>>              \
  METAL_FUNC void store(space T& to, T value) {              \
    W words[sizeof(T) / sizeof(W)];                          \
    __builtin_memcpy(words, &value, sizeof(T));              \
    for (uint i = 0; i < sizeof(T) / sizeof(W); ++i) {       \
      reinterpret_cast<space W*>(&to)[i] = words[i];         \
    }                                                        \
  }
MM_COUNTED_STRUCTS(device)
MM_COUNTED_STRUCTS(threadgroup)
#undef MM_COUNTED_STRUCTS

}  // namespace emulator
}  // namespace metal
