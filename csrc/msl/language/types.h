// Scalar and vector types: sizes, alignments and swizzles of the Metal Shading Language.
#pragma once

#include "keywords.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using uintptr_t = unsigned long;
using intptr_t = long;
using half =
    _Float16;  // IEEE binary16; every operation rounds once (-ffloat16-excess-precision=none)
using bfloat = __bf16;  // 8 bits of exponent, 8 of significand; every operation rounds once
static_assert(sizeof(long) == 8 && sizeof(int) == 4, "Metal's long has 64 bits");

// 1.0h; the other suffixes (H, bf, BF) are not C++'s, and msl/translate.py writes casts for them.
constexpr half operator""h(long double x) { return static_cast<half>(x); }

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T>
struct packed3;

}  // namespace metal

// float2 … float4 have the alignment of their size (float3 that of float4); packed_float2 to
// packed_float4 that of one component.
#define MM_VECTOR_TYPES(T)                                        \
  using T##2 = metal::vec<T, 2>;                                  \
  using T##3 = metal::vec<T, 3>;                                  \
  using T##4 = metal::vec<T, 4>;                                  \
  typedef T##2 packed_##T##2 __attribute__((aligned(sizeof(T)))); \
  using packed_##T##3 = metal::packed3<T>;                        \
  typedef T##4 packed_##T##4 __attribute__((aligned(sizeof(T))));
MM_VECTOR_TYPES(char)
MM_VECTOR_TYPES(uchar)
MM_VECTOR_TYPES(short)
MM_VECTOR_TYPES(ushort)
MM_VECTOR_TYPES(int)
MM_VECTOR_TYPES(uint)
MM_VECTOR_TYPES(long)
MM_VECTOR_TYPES(ulong)
MM_VECTOR_TYPES(half)
MM_VECTOR_TYPES(bfloat)
MM_VECTOR_TYPES(float)
#undef MM_VECTOR_TYPES
using bool2 = metal::vec<bool, 2>;
using bool3 = metal::vec<bool, 3>;
using bool4 = metal::vec<bool, 4>;

namespace metal {

// The element type of a vector. `size` is 1 for a scalar.
template <class T>
struct vector_of {
  using element = T;
  static constexpr int size = 1;
};
template <class T, int N>
struct vector_of<vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};
template <class T>
struct vector_of<packed3<T>> {
  using element = T;
  static constexpr int size = 3;
};
template <class T>
using element_t = typename vector_of<T>::element;

// clang converts no half to bfloat; through float it is rounded once.
template <class E, class A>
METAL_FUNC constexpr E convert_element(A a) {
  if constexpr ((__is_same(E, bfloat) && __is_same(A, half)) ||
                (__is_same(E, half) && __is_same(A, bfloat))) {
    return static_cast<E>(static_cast<float>(a));
  } else {
    return static_cast<E>(a);
  }
}

template <class V, class A>
METAL_FUNC constexpr void append_components(thread V& v, thread int& at, A a) {
  using E = element_t<V>;
  if constexpr (vector_of<A>::size == 1) {
    v[at++] = convert_element<E>(a);
  } else {
    for (int i = 0; i < vector_of<A>::size; ++i) {
      v[at++] = convert_element<E>(static_cast<element_t<A>>(a[i]));
    }
  }
}

template <class V, class A>
METAL_FUNC constexpr V convert_to(A a) {
  if constexpr (vector_of<V>::size == 1) {
    return convert_element<V>(a);
  } else if constexpr (vector_of<A>::size == 1) {
    return static_cast<V>(convert_element<element_t<V>>(a));
  } else {
    static_assert(vector_of<A>::size == vector_of<V>::size, "a vector of another length");
    return __builtin_convertvector(static_cast<vec<element_t<A>, vector_of<A>::size>>(a), V);
  }
}

// V(a, b, …): a scalar fills all components, a vector is converted, several arguments are laid end
// to end.
template <class V, class... A>
METAL_FUNC constexpr V construct(A... a) {
  if constexpr (sizeof...(A) == 0) {
    return V{};
  } else if constexpr (sizeof...(A) == 1) {
    return convert_to<V>(a...);
  } else {
    static_assert((vector_of<A>::size + ...) == vector_of<V>::size,
                  "too few or too many components");
    V v{};
    int at = 0;
    (append_components(v, at, a), ...);
    return v;
  }
}

template <class T>
struct packed3 {
  T x, y, z;
  packed3() = default;
  constexpr packed3(T a) : x(a), y(a), z(a) {}
  constexpr packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  constexpr packed3(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  packed3(const thread packed3&) = default;
  packed3(const device packed3& p) : x(p.x), y(p.y), z(p.z) {}
  packed3(constant packed3& p) : x(p.x), y(p.y), z(p.z) {}
  packed3(const threadgroup packed3& p) : x(p.x), y(p.y), z(p.z) {}
  constexpr operator vec<T, 3>() const { return vec<T, 3>{x, y, z}; }
  constexpr T operator[](int i) const { return i == 0 ? x : i == 1 ? y : z; }
};

template <class To, class From>
METAL_FUNC constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the types differ in size");
  return __builtin_bit_cast(To, x);
}

}  // namespace metal

using metal::as_type;
