// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric>: on scalars
// and vectors.
#pragma once

#include "traits.h"

namespace metal {

// A function of clang's elementwise builtins: one result per component, rounded to the type of the
// argument.
#define MM_UNARY(name, builtin)      \
  template <class T>                 \
  METAL_FUNC constexpr T name(T x) { \
    return builtin(x);               \
  }
#define MM_MATH_UNARY(name, builtin) \
  MM_UNARY(name, builtin)            \
  namespace precise {                \
  MM_UNARY(name, builtin)            \
  }                                  \
  namespace fast {                   \
  MM_UNARY(name, builtin)            \
  }
MM_MATH_UNARY(acos, __builtin_elementwise_acos)
MM_MATH_UNARY(asin, __builtin_elementwise_asin)
MM_MATH_UNARY(atan, __builtin_elementwise_atan)
MM_MATH_UNARY(ceil, __builtin_elementwise_ceil)
MM_MATH_UNARY(cos, __builtin_elementwise_cos)
MM_MATH_UNARY(cosh, __builtin_elementwise_cosh)
MM_MATH_UNARY(exp, __builtin_elementwise_exp)
MM_MATH_UNARY(exp2, __builtin_elementwise_exp2)
MM_MATH_UNARY(exp10, __builtin_elementwise_exp10)
MM_MATH_UNARY(fabs, __builtin_elementwise_abs)
MM_MATH_UNARY(floor, __builtin_elementwise_floor)
MM_MATH_UNARY(log, __builtin_elementwise_log)
MM_MATH_UNARY(log2, __builtin_elementwise_log2)
MM_MATH_UNARY(log10, __builtin_elementwise_log10)
MM_MATH_UNARY(rint, __builtin_elementwise_roundeven)
MM_MATH_UNARY(round, __builtin_elementwise_round)
MM_MATH_UNARY(sin, __builtin_elementwise_sin)
MM_MATH_UNARY(sinh, __builtin_elementwise_sinh)
MM_MATH_UNARY(sqrt, __builtin_elementwise_sqrt)
MM_MATH_UNARY(tan, __builtin_elementwise_tan)
MM_MATH_UNARY(tanh, __builtin_elementwise_tanh)
MM_MATH_UNARY(trunc, __builtin_elementwise_trunc)
MM_UNARY(popcount, __builtin_elementwise_popcount)
MM_UNARY(reverse_bits, __builtin_elementwise_bitreverse)
#undef MM_MATH_UNARY
#undef MM_UNARY

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

// Two arguments of one type, or a vector and a scalar that fills one.
#define MM_BINARY(name, ...)                                               \
  template <class T>                                                       \
  METAL_FUNC constexpr T name(T x, T y) {                                  \
    __VA_ARGS__;                                                           \
  }                                                                        \
  template <class T, int N>                                                \
  METAL_FUNC constexpr vec<T, N> name(vec<T, N> x, type_identity_t<T> s) { \
    return name(x, static_cast<vec<T, N>>(s));                             \
  }                                                                        \
  template <class T, int N>                                                \
  METAL_FUNC constexpr vec<T, N> name(type_identity_t<T> s, vec<T, N> y) { \
    return name(static_cast<vec<T, N>>(s), y);                             \
  }
#define MM_SMALLEST(builtin_int, builtin_float)      \
  if constexpr (is_floating_point_v<element_t<T>>) { \
    return builtin_float(x, y);                      \
  } else {                                           \
    return builtin_int(x, y);                        \
  }
#define MM_FLOAT_BINARY(name, ...) \
  MM_BINARY(name, __VA_ARGS__)     \
  namespace precise {              \
  MM_BINARY(name, __VA_ARGS__)     \
  }                                \
  namespace fast {                 \
  MM_BINARY(name, __VA_ARGS__)     \
  }
MM_FLOAT_BINARY(min, MM_SMALLEST(__builtin_elementwise_min, __builtin_elementwise_minnum))
MM_FLOAT_BINARY(max, MM_SMALLEST(__builtin_elementwise_max, __builtin_elementwise_maxnum))
MM_FLOAT_BINARY(fmin, return __builtin_elementwise_minnum(x, y))
MM_FLOAT_BINARY(fmax, return __builtin_elementwise_maxnum(x, y))
MM_FLOAT_BINARY(pow, return __builtin_elementwise_pow(x, y))
MM_FLOAT_BINARY(powr, return __builtin_elementwise_pow(x, y))
MM_FLOAT_BINARY(fmod, return __builtin_elementwise_fmod(x, y))
MM_FLOAT_BINARY(atan2, return __builtin_elementwise_atan2(x, y))
MM_FLOAT_BINARY(copysign, return __builtin_elementwise_copysign(x, y))
MM_FLOAT_BINARY(fdim, return x > y ? x - y : (x - x))
MM_FLOAT_BINARY(step, return select(construct<T>(1), construct<T>(0), y < x))
MM_FLOAT_BINARY(divide, return x / y)
MM_BINARY(addsat, return __builtin_elementwise_add_sat(x, y))
MM_BINARY(subsat, return __builtin_elementwise_sub_sat(x, y))
#undef MM_FLOAT_BINARY
#undef MM_SMALLEST
#undef MM_BINARY

template <class T>
METAL_FUNC constexpr T fma(T a, T b, T c) {
  return __builtin_elementwise_fma(a, b, c);
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> fma(vec<T, N> a, type_identity_t<T> b, vec<T, N> c) {
  return __builtin_elementwise_fma(a, static_cast<vec<T, N>>(b), c);
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> fma(type_identity_t<T> a, vec<T, N> b, vec<T, N> c) {
  return __builtin_elementwise_fma(static_cast<vec<T, N>>(a), b, c);
}
template <class T>
METAL_FUNC constexpr T mad(T a, T b, T c) {
  return a * b + c;
}
template <class T>
METAL_FUNC constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> clamp(vec<T, N> x, type_identity_t<T> low, type_identity_t<T> high) {
  return min(max(x, low), high);
}
template <class T>
METAL_FUNC constexpr T saturate(T x) {
  return clamp(x, construct<T>(0), construct<T>(1));
}
template <class T>
METAL_FUNC constexpr T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> mix(vec<T, N> x, vec<T, N> y, type_identity_t<T> a) {
  return x + (y - x) * a;
}
template <class T>
METAL_FUNC constexpr T smoothstep(T low, T high, T x) {
  T t = saturate((x - low) / (high - low));
  return t * t * (construct<T>(3) - construct<T>(2) * t);
}
template <class T>
METAL_FUNC constexpr T rsqrt(T x) {
  return construct<T>(1) / sqrt(x);
}
template <class T>
METAL_FUNC constexpr T fract(T x) {
  return x - floor(x);
}
template <class T>
METAL_FUNC constexpr T exp10m1(T x) {
  return exp10(x) - construct<T>(1);
}
METAL_FUNC float erf(float x) { return __builtin_erff(x); }
METAL_FUNC float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
METAL_FUNC half ldexp(half x, int e) { return static_cast<half>(__builtin_ldexpf(x, e)); }
METAL_FUNC float log1p(float x) { return __builtin_log1pf(x); }
METAL_FUNC float expm1(float x) { return __builtin_expm1f(x); }
METAL_FUNC float asinh(float x) { return __builtin_asinhf(x); }
METAL_FUNC float acosh(float x) { return __builtin_acoshf(x); }
METAL_FUNC float atanh(float x) { return __builtin_atanhf(x); }
METAL_FUNC float frexp(float x, thread int& e) { return __builtin_frexpf(x, &e); }
METAL_FUNC float modf(float x, thread float& whole) { return __builtin_modff(x, &whole); }
METAL_FUNC int ilogb(float x) { return __builtin_ilogbf(x); }
namespace precise {
using metal::clamp;
using metal::fma;
using metal::rsqrt;
using metal::saturate;
}  // namespace precise
namespace fast {
using metal::clamp;
using metal::fma;
using metal::rsqrt;
using metal::saturate;
}  // namespace fast

// select(a, b, c): b where c is true (a vector: where its component is not 0).
template <class T, class C>
METAL_FUNC constexpr T select(T a, T b, C c) {
  if constexpr (vector_of<C>::size == 1) {
    return c ? b : a;
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = c[i] ? b[i] : a[i];
    }
    return v;
  }
}
template <class C>
METAL_FUNC constexpr bool any(C c) {
  if constexpr (vector_of<C>::size == 1) {
    return c;
  } else {
    bool r = false;
    for (int i = 0; i < vector_of<C>::size; ++i) {
      r = r || c[i];
    }
    return r;
  }
}
template <class C>
METAL_FUNC constexpr bool all(C c) {
  if constexpr (vector_of<C>::size == 1) {
    return c;
  } else {
    bool r = true;
    for (int i = 0; i < vector_of<C>::size; ++i) {
      r = r && c[i];
    }
    return r;
  }
}

#define MM_CLASSIFY(name, test)                      \
  template <class T>                                 \
  METAL_FUNC constexpr auto name(T x) {              \
    if constexpr (vector_of<T>::size == 1) {         \
      return static_cast<bool>(test);                \
    } else {                                         \
      vec<bool, vector_of<T>::size> r{};             \
      for (int i = 0; i < vector_of<T>::size; ++i) { \
        r[i] = name(x[i]);                           \
      }                                              \
      return r;                                      \
    }                                                \
  }
MM_CLASSIFY(isnan, x != x)
MM_CLASSIFY(isinf, __builtin_isinf(static_cast<float>(x)))
MM_CLASSIFY(isfinite, __builtin_isfinite(static_cast<float>(x)))
MM_CLASSIFY(isnormal, __builtin_isnormal(static_cast<float>(x)))
MM_CLASSIFY(signbit, __builtin_signbit(static_cast<float>(x)))
#undef MM_CLASSIFY
template <class T>
METAL_FUNC constexpr T sign(T x) {
  if constexpr (vector_of<T>::size == 1) {
    return x > T(0) ? T(1) : x < T(0) ? T(-1) : x == x ? x : T(0);
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = sign(x[i]);
    }
    return v;
  }
}

template <class T, int N>
METAL_FUNC constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}
METAL_FUNC constexpr float dot(float a, float b) { return a * b; }
template <class T, int N>
METAL_FUNC constexpr T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
METAL_FUNC constexpr T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class T, int N>
METAL_FUNC constexpr T distance(vec<T, N> a, vec<T, N> b) {
  return length(a - b);
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> normalize(vec<T, N> a) {
  return a * rsqrt(dot(a, a));
}
template <class T>
METAL_FUNC constexpr vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

}  // namespace metal
