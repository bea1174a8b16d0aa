// Names of Apple's compiler below its standard library, which some libraries call to add overloads
// for bfloat.
#pragma once

#include "simd.h"

// Math functions take a last argument that says how exact they are; here they are equally exact.
constexpr bool __METAL_FAST_MATH__ = true;
constexpr bool __METAL_PRECISE_MATH__ = false;
constexpr bool __METAL_MAYBE_FAST_MATH__ = false;

#define MM_BUILTIN1(name)                          \
  template <class T>                               \
  METAL_FUNC T __metal_##name(T x, bool = false) { \
    return metal::name(x);                         \
  }
#define MM_BUILTIN2(name)                               \
  template <class T, class U>                           \
  METAL_FUNC T __metal_##name(T x, U y, bool = false) { \
    return metal::name(x, y);                           \
  }
#define MM_BUILTIN3(name)                                    \
  template <class T>                                         \
  METAL_FUNC T __metal_##name(T x, T y, T z, bool = false) { \
    return metal::name(x, y, z);                             \
  }
MM_BUILTIN1(acos)
MM_BUILTIN1(acosh)
MM_BUILTIN1(asin)
MM_BUILTIN1(asinh)
MM_BUILTIN1(atan)
MM_BUILTIN1(atanh)
MM_BUILTIN1(ceil)
MM_BUILTIN1(cos)
MM_BUILTIN1(cosh)
MM_BUILTIN1(cospi)
MM_BUILTIN1(exp)
MM_BUILTIN1(exp10)
MM_BUILTIN1(exp2)
MM_BUILTIN1(fabs)
MM_BUILTIN1(floor)
MM_BUILTIN1(fract)
MM_BUILTIN1(log)
MM_BUILTIN1(log10)
MM_BUILTIN1(log2)
MM_BUILTIN1(rint)
MM_BUILTIN1(round)
MM_BUILTIN1(rsqrt)
MM_BUILTIN1(sin)
MM_BUILTIN1(sinh)
MM_BUILTIN1(sinpi)
MM_BUILTIN1(sqrt)
MM_BUILTIN1(tan)
MM_BUILTIN1(tanh)
MM_BUILTIN1(tanpi)
MM_BUILTIN1(trunc)
MM_BUILTIN2(atan2)
MM_BUILTIN2(divide)
MM_BUILTIN2(fmax)
MM_BUILTIN2(fmin)
MM_BUILTIN2(fmod)
MM_BUILTIN2(ldexp)
MM_BUILTIN2(nextafter)
MM_BUILTIN2(pow)
MM_BUILTIN2(powr)
MM_BUILTIN3(fma)
MM_BUILTIN3(fmax3)
MM_BUILTIN3(fmedian3)
MM_BUILTIN3(fmin3)
#undef MM_BUILTIN1
#undef MM_BUILTIN2
#undef MM_BUILTIN3
template <class T>
METAL_FUNC T __metal_frexp(T x, thread int* e) {
  return metal::frexp(x, *e);
}

#define MM_BUILTIN_REDUCE(name)               \
  template <class T>                          \
  METAL_FUNC T __metal_##name(T x, MM_SITE) { \
    return metal::name(x, file, line);        \
  }
#define MM_BUILTIN_SHUFFLE(name)                        \
  template <class T>                                    \
  METAL_FUNC T __metal_##name(T x, ushort n, MM_SITE) { \
    return metal::name(x, n, file, line);               \
  }
#define MM_BUILTIN_FILL(name)                                                  \
  template <class T>                                                           \
  METAL_FUNC T __metal_##name(T x, T fill, ushort n, ushort modulo, MM_SITE) { \
    return metal::name(x, fill, n, modulo, file, line);                        \
  }
MM_BUILTIN_REDUCE(simd_and)
MM_BUILTIN_REDUCE(simd_broadcast_first)
MM_BUILTIN_REDUCE(simd_max)
MM_BUILTIN_REDUCE(simd_min)
MM_BUILTIN_REDUCE(simd_or)
MM_BUILTIN_REDUCE(simd_prefix_exclusive_product)
MM_BUILTIN_REDUCE(simd_prefix_exclusive_sum)
MM_BUILTIN_REDUCE(simd_prefix_inclusive_product)
MM_BUILTIN_REDUCE(simd_prefix_inclusive_sum)
MM_BUILTIN_REDUCE(simd_product)
MM_BUILTIN_REDUCE(simd_sum)
MM_BUILTIN_REDUCE(simd_xor)
MM_BUILTIN_SHUFFLE(simd_broadcast)
MM_BUILTIN_SHUFFLE(simd_shuffle)
MM_BUILTIN_SHUFFLE(simd_shuffle_down)
MM_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
MM_BUILTIN_SHUFFLE(simd_shuffle_rotate_up)
MM_BUILTIN_SHUFFLE(simd_shuffle_up)
MM_BUILTIN_SHUFFLE(simd_shuffle_xor)
MM_BUILTIN_FILL(simd_shuffle_and_fill_down)
MM_BUILTIN_FILL(simd_shuffle_and_fill_up)
#undef MM_BUILTIN_REDUCE
#undef MM_BUILTIN_SHUFFLE
#undef MM_BUILTIN_FILL

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return static_cast<ushort>(mm_lane());
}
