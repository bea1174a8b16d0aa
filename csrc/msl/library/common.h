// <metal_common>, <metal_integer>'s min, max and clamp, <metal_relational>.
#pragma once

#include "functions.h"

namespace metal {

template <class T>
METAL_FUNC constexpr T abs(T x) {
  if constexpr (is_unsigned_v<element_t<T>>) {
    return x;
  } else if constexpr (vector_of<T>::size == 1 && is_integral_v<T>) {
    return x < 0 ? static_cast<T>(-x) : x;
  } else {
    return __builtin_elementwise_abs(x);
  }
}
namespace precise {
using metal::abs;
}
namespace fast {
using metal::abs;
}

#define MM_EXTREME(name, before, builtin_int, builtin_float)                          \
  MM_EVERYWHERE(MM_BINARY(                                                            \
      name,                                                                           \
      if constexpr (is_floating_point_v<element_t<T>>) {                              \
        return builtin_float(x, y);                                                   \
      } else if constexpr (vector_of<T>::size == 1) { return before ? x : y; } else { \
        return builtin_int(x, y);                                                     \
      }) MM_FLOATS2(name))
MM_EXTREME(min, !(y < x), __builtin_elementwise_min, __builtin_elementwise_minnum)
MM_EXTREME(max, !(x < y), __builtin_elementwise_max, __builtin_elementwise_maxnum)
#undef MM_EXTREME
MM_MATH3(min3, return min(min(x, y), z))
MM_MATH3(max3, return max(max(x, y), z))
MM_MATH3(median3, return max(min(x, y), min(max(x, y), z)))
MM_MATH3(clamp, return min(max(x, y), z))
MM_MATH3(mix, return x + (y - x) * z)
MM_TERNARY(mad, return x * y + z)

// Overloads, of which a call with two types takes the one that converts best, or is ambiguous.
#define MM_INTEGERS(T)                                           \
  METAL_FUNC constexpr T min(T x, T y) { return y < x ? y : x; } \
  METAL_FUNC constexpr T max(T x, T y) { return x < y ? y : x; } \
  METAL_FUNC constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
MM_INTEGERS(char)
MM_INTEGERS(uchar)
MM_INTEGERS(short)
MM_INTEGERS(ushort)
MM_INTEGERS(int)
MM_INTEGERS(uint)
MM_INTEGERS(long)
MM_INTEGERS(ulong)
#undef MM_INTEGERS

MM_MATH1(saturate, clamp(x, convert_to<T>(0), convert_to<T>(1)))
template <class T>
METAL_FUNC constexpr T sign(T x) {
  if constexpr (vector_of<T>::size == 1) {
    return x > T(0) ? T(1) : x < T(0) ? T(-1) : x == x ? x : T(0);
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) v[i] = sign(x[i]);
    return v;
  }
}

// select(a, b, c): b where c is true (a vector: where its component is not 0).
template <class T, class C>
METAL_FUNC constexpr T select(T a, T b, C c) {
  if constexpr (vector_of<C>::size == 1) {
    return c ? b : a;
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) v[i] = c[i] ? b[i] : a[i];
    return v;
  }
}
template <class A, class B, class C, class V = mixed_t<A, B>>
METAL_FUNC constexpr V select(A a, B b, C c) {
  return select(convert_to<V>(a), convert_to<V>(b), c);
}
METAL_FUNC constexpr float select(float a, float b, bool c) { return c ? b : a; }

MM_MATH2(step, return select(convert_to<T>(1), convert_to<T>(0), y < x))
MM_MATH3(smoothstep, const T t = saturate((z - x) / (y - x));
         return t * t * (convert_to<T>(3) - convert_to<T>(2) * t))

#define MM_FOLD(name, start, expression)                           \
  template <class C>                                               \
  METAL_FUNC constexpr bool name(C c) {                            \
    if constexpr (vector_of<C>::size == 1) {                       \
      return c;                                                    \
    } else {                                                       \
      bool r = start;                                              \
      for (int i = 0; i < vector_of<C>::size; ++i) r = expression; \
      return r;                                                    \
    }                                                              \
  }
MM_FOLD(any, false, r || c[i])
MM_FOLD(all, true, r&& c[i])
#undef MM_FOLD

#define MM_CLASSIFY(name, test)                                       \
  template <class T>                                                  \
  METAL_FUNC constexpr auto name(T x) {                               \
    if constexpr (vector_of<T>::size == 1) {                          \
      return static_cast<bool>(test);                                 \
    } else {                                                          \
      vec<bool, vector_of<T>::size> r{};                              \
      for (int i = 0; i < vector_of<T>::size; ++i) r[i] = name(x[i]); \
      return r;                                                       \
    }                                                                 \
  }
MM_CLASSIFY(isnan, x != x)
MM_CLASSIFY(isinf, __builtin_isinf(static_cast<float>(x)))
MM_CLASSIFY(isfinite, __builtin_isfinite(static_cast<float>(x)))
MM_CLASSIFY(isnormal, __builtin_isnormal(static_cast<float>(x)))
MM_CLASSIFY(signbit, __builtin_signbit(static_cast<float>(x)))
#undef MM_CLASSIFY
template <class T>
METAL_FUNC constexpr auto isunordered(T x, T y) {
  return isnan(x) | isnan(y);
}
template <class T>
METAL_FUNC constexpr auto isordered(T x, T y) {
  return !isunordered(x, y);
}

}  // namespace metal
