// <metal_math>: functions of half, bfloat and float and of vectors of them, component by component.
#pragma once

#include "language/traits.h"

namespace metal {

// The vector type of a call that mixes vectors of one type with scalars, which fill one.
template <class... A>
struct Mixed {};
template <class V, int Scalars>
struct MixedOf {
  using type = V;
};
template <class V>
struct MixedOf<V, 0> {};  // vectors only: no conversion
template <class T, int N, class B>
struct Mixed<vec<T, N>, B> : MixedOf<vec<T, N>, vector_of<B>::size == 1> {};
template <class T, class A, int N>
struct Mixed<A, vec<T, N>> : MixedOf<vec<T, N>, vector_of<A>::size == 1> {};
template <class T, int N, class U, int M>
struct Mixed<vec<T, N>, vec<U, M>> {};
template <class A, class B, class C>
struct Mixed<A, B, C>
    : conditional_t<
          (vector_of<A>::size > 1),
          MixedOf<A, (vector_of<B>::size == 1) + (vector_of<C>::size == 1)>,
          conditional_t<(vector_of<B>::size > 1), MixedOf<B, 1>,
                        conditional_t<(vector_of<C>::size > 1), MixedOf<C, 1>, Mixed<>>>> {};
template <class... A>
using mixed_t = typename Mixed<A...>::type;

// A function of clang's elementwise builtins: one result per component, rounded to the type of the
// argument.
#define MM_UNARY(name, expression)   \
  template <class T>                 \
  METAL_FUNC constexpr T name(T x) { \
    return expression;               \
  }
// Two arguments of one type, or a vector and a scalar. Metal's own are overloads for half and
// float, which convert scalars of other types.
#define MM_BINARY(name, ...)                           \
  template <class T>                                   \
  METAL_FUNC constexpr T name(T x, T y) {              \
    __VA_ARGS__;                                       \
  }                                                    \
  template <class A, class B, class V = mixed_t<A, B>> \
  METAL_FUNC constexpr V name(A x, B y) {              \
    return name(convert_to<V>(x), convert_to<V>(y));   \
  }
#define MM_TERNARY(name, ...)                                          \
  template <class T>                                                   \
  METAL_FUNC constexpr T name(T x, T y, T z) {                         \
    __VA_ARGS__;                                                       \
  }                                                                    \
  template <class A, class B, class C, class V = mixed_t<A, B, C>>     \
  METAL_FUNC constexpr V name(A x, B y, C z) {                         \
    return name(convert_to<V>(x), convert_to<V>(y), convert_to<V>(z)); \
  }
#define MM_FLOATS2(name)                                            \
  METAL_FUNC half name(half x, half y) { return name<half>(x, y); } \
  METAL_FUNC float name(float x, float y) { return name<float>(x, y); }
#define MM_FLOATS3(name)                                                       \
  METAL_FUNC half name(half x, half y, half z) { return name<half>(x, y, z); } \
  METAL_FUNC float name(float x, float y, float z) { return name<float>(x, y, z); }
// Functions that are alike in metal, metal::precise and metal::fast.
#define MM_EVERYWHERE(...) \
  __VA_ARGS__              \
  namespace precise {      \
  __VA_ARGS__              \
  }                        \
  namespace fast {         \
  __VA_ARGS__              \
  }
#define MM_MATH1(name, expression) MM_EVERYWHERE(MM_UNARY(name, expression))
#define MM_MATH2(name, ...) MM_EVERYWHERE(MM_BINARY(name, __VA_ARGS__) MM_FLOATS2(name))
#define MM_MATH3(name, ...) MM_EVERYWHERE(MM_TERNARY(name, __VA_ARGS__) MM_FLOATS3(name))

namespace emulator {

// f(float) of each component, where clang has no elementwise builtin.
template <class T, class F>
METAL_FUNC constexpr T by_float(T x, F f) {
  if constexpr (vector_of<T>::size == 1) {
    return static_cast<T>(f(static_cast<float>(x)));
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = static_cast<element_t<T>>(f(static_cast<float>(x[i])));
    }
    return v;
  }
}
constexpr constant float kPi = 3.14159274101257324219f;

}  // namespace emulator

#define MM_FUNCTION1(name, expression) MM_MATH1(name, expression)
#define MM_FUNCTION2(name, ...) MM_MATH2(name, __VA_ARGS__)
#define MM_FUNCTION3(name, ...) MM_MATH3(name, __VA_ARGS__)
#include "function_table.h"

METAL_FUNC float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
METAL_FUNC half nextafter(half x, half y) {
  if (!(x != y)) return y;
  auto bits = __builtin_bit_cast(short, x);
  if (x == static_cast<half>(0)) return __builtin_copysignf(0x1.0p-24f, static_cast<float>(y));
  bits += (y > x) == (x > static_cast<half>(0)) ? 1 : -1;
  return __builtin_bit_cast(half, bits);
}

template <class T>
METAL_FUNC auto ilogb(T x) {
  if constexpr (vector_of<T>::size == 1) {
    return __builtin_ilogbf(static_cast<float>(x));
  } else {
    vec<int, vector_of<T>::size> e{};
    for (int i = 0; i < vector_of<T>::size; ++i) e[i] = __builtin_ilogbf(static_cast<float>(x[i]));
    return e;
  }
}
template <class T, class E>
METAL_FUNC T ldexp(T x, E e) {
  if constexpr (vector_of<T>::size == 1) {
    return static_cast<T>(__builtin_ldexpf(static_cast<float>(x), e));
  } else {
    for (int i = 0; i < vector_of<T>::size; ++i) {
      x[i] = ldexp(static_cast<element_t<T>>(x[i]), static_cast<int>(e[i]));
    }
    return x;
  }
}
// x = result * 2^e, the result in [0.5, 1).
template <class T, class E>
METAL_FUNC T frexp(T x, thread E& e) {
  if constexpr (vector_of<T>::size == 1) {
    return static_cast<T>(__builtin_frexpf(static_cast<float>(x), &e));
  } else {
    for (int i = 0; i < vector_of<T>::size; ++i) {
      int one = 0;
      x[i] = static_cast<element_t<T>>(__builtin_frexpf(static_cast<float>(x[i]), &one));
      e[i] = one;
    }
    return x;
  }
}
template <class T>
METAL_FUNC T modf(T x, thread T& whole) {
  whole = trunc(x);
  return x - whole;
}
template <class T>
METAL_FUNC T sincos(T x, thread T& cosine) {
  cosine = cos(x);
  return sin(x);
}
namespace precise {
using metal::frexp;
using metal::ldexp;
using metal::modf;
using metal::sincos;
}  // namespace precise
namespace fast {
using metal::frexp;
using metal::ldexp;
using metal::modf;
using metal::sincos;
}  // namespace fast

}  // namespace metal
