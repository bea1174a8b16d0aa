// Names of Apple's compiler below its standard library, which some libraries call to add overloads
// for bfloat.
#pragma once

#include "simd.h"

// Math functions take a last argument that says how exact they are; here they are equally exact.
constexpr bool __METAL_FAST_MATH__ = true;
constexpr bool __METAL_PRECISE_MATH__ = false;
constexpr bool __METAL_MAYBE_FAST_MATH__ = false;

#define MM_FUNCTION1(name, ...)                    \
  template <class T>                               \
  METAL_FUNC T __metal_##name(T x, bool = false) { \
    return metal::name(x);                         \
  }
#define MM_BUILTIN2(name)                               \
  template <class T, class U>                           \
  METAL_FUNC T __metal_##name(T x, U y, bool = false) { \
    return metal::name(x, y);                           \
  }
MM_BUILTIN2(ldexp)
MM_BUILTIN2(nextafter)
#define MM_FUNCTION2(name, ...) MM_BUILTIN2(name)
#define MM_FUNCTION3(name, ...)                              \
  template <class T>                                         \
  METAL_FUNC T __metal_##name(T x, T y, T z, bool = false) { \
    return metal::name(x, y, z);                             \
  }
#include "library/function_table.h"
#undef MM_BUILTIN2
template <class T>
METAL_FUNC T __metal_frexp(T x, thread int* e) {
  return metal::frexp(x, *e);
}

#define MM_BUILTIN_LANES(name)                \
  template <class T>                          \
  METAL_FUNC T __metal_##name(T x, MM_SITE) { \
    return metal::name(x, file, line);        \
  }
#define MM_REDUCE(name, scope, ...) MM_BUILTIN_LANES(scope##_##name)
#define MM_PREFIX(name, scope, ...) MM_BUILTIN_LANES(scope##_prefix_##name)
#define MM_SHUFFLE(name, scope, ...)                              \
  template <class T>                                              \
  METAL_FUNC T __metal_##scope##_##name(T x, ushort n, MM_SITE) { \
    return metal::scope##_##name(x, n, file, line);               \
  }
#define MM_FILL(name)                                                          \
  template <class T>                                                           \
  METAL_FUNC T __metal_##name(T x, T fill, ushort n, ushort modulo, MM_SITE) { \
    return metal::name(x, fill, n, modulo, file, line);                        \
  }
MM_EACH_LANE_FUNCTION(simd, )
MM_BUILTIN_LANES(simd_broadcast_first)
MM_FILL(simd_shuffle_and_fill_down)
MM_FILL(simd_shuffle_and_fill_up)
#undef MM_BUILTIN_LANES
#undef MM_REDUCE
#undef MM_PREFIX
#undef MM_SHUFFLE
#undef MM_FILL

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return kMmScopeSimd; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return static_cast<ushort>(mm_lane());
}
