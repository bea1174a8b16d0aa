// <metal_geometric>: functions of vectors as a whole.
#pragma once

#include "common.h"

namespace metal {

template <class T, int N>
METAL_FUNC constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
METAL_FUNC constexpr T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
METAL_FUNC constexpr T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class T, int N>
METAL_FUNC constexpr T distance_squared(vec<T, N> a, vec<T, N> b) {
  return length_squared(a - b);
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
template <class T, int N>
METAL_FUNC constexpr vec<T, N> reflect(vec<T, N> incident, vec<T, N> normal) {
  return incident - convert_to<T>(2) * dot(normal, incident) * normal;
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> faceforward(vec<T, N> n, vec<T, N> incident, vec<T, N> reference) {
  return dot(reference, incident) < T(0) ? n : -n;
}

}  // namespace metal
