// <metal_matrix>: floatCxR, halfCxR, bfloatCxR; C columns of R values, m[column][row].
#pragma once

#include "math.h"

namespace metal {

template <class T, int C, int R>
struct matrix {
  vec<T, R> columns[C];

  matrix() = default;
  constexpr explicit matrix(T diagonal) : columns{} {
    for (int i = 0; i < (C < R ? C : R); ++i) columns[i][i] = diagonal;
  }
  template <class... V, enable_if_t<sizeof...(V) == C && (C > 1), int> = 0>
  constexpr matrix(V... v) : columns{} {
    int i = 0;
    ((columns[i++] = construct<vec<T, R>>(v)), ...);
  }
  template <class... V, enable_if_t<sizeof...(V) == C * R, int> = 0, class = void>
  constexpr matrix(V... v) : columns{} {
    int i = 0;
    ((columns[i / R][i % R] = static_cast<T>(v), ++i), ...);
  }
  matrix(const thread matrix&) = default;
  // Copies out of the other address spaces, and conversions.
  matrix(const device matrix& m) { copy(m); }
  matrix(constant matrix& m) { copy(m); }
  matrix(const threadgroup matrix& m) { copy(m); }
  template <class U>
  explicit matrix(const thread matrix<U, C, R>& m) {
    copy(m);
  }
  template <class U>
  explicit matrix(const device matrix<U, C, R>& m) {
    copy(m);
  }
  template <class U>
  explicit matrix(constant matrix<U, C, R>& m) {
    copy(m);
  }
  template <class U>
  explicit matrix(const threadgroup matrix<U, C, R>& m) {
    copy(m);
  }
  thread matrix& operator=(const thread matrix&) = default;

  thread vec<T, R>& operator[](int c) { return columns[c]; }
  constexpr const thread vec<T, R>& operator[](int c) const { return columns[c]; }

 private:
  template <class M>
  METAL_FUNC void copy(M& m) {
    for (int c = 0; c < C; ++c) columns[c] = construct<vec<T, R>>(m.columns[c]);
  }
};

template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; ++c) a[c] += b[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; ++c) a[c] -= b[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(matrix<T, C, R> a, type_identity_t<T> s) {
  for (int c = 0; c < C; ++c) a[c] *= s;
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator*(type_identity_t<T> s, matrix<T, C, R> a) {
  return a * s;
}
template <class T, int C, int R>
METAL_FUNC vec<T, R> operator*(matrix<T, C, R> a, vec<T, C> x) {
  vec<T, R> sum = a[0] * x[0];
  for (int c = 1; c < C; ++c) sum += a[c] * x[c];
  return sum;
}
template <class T, int C, int R>
METAL_FUNC vec<T, C> operator*(vec<T, R> x, matrix<T, C, R> a) {
  vec<T, C> v{};
  for (int c = 0; c < C; ++c) v[c] = dot(x, a[c]);
  return v;
}
template <class T, int C, int R, int K>
METAL_FUNC matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> v;
  for (int c = 0; c < C; ++c) v[c] = a * b[c];
  return v;
}
template <class T>
METAL_FUNC T determinant(matrix<T, 2, 2> a) {
  return a[0][0] * a[1][1] - a[1][0] * a[0][1];
}
template <class T, int N>
METAL_FUNC T determinant(matrix<T, N, N> a) {
  T sum = 0;
  for (int skip = 0; skip < N; ++skip) {  // along the first row
    matrix<T, N - 1, N - 1> rest;
    for (int c = 0; c < N - 1; ++c) {
      for (int r = 0; r < N - 1; ++r) rest[c][r] = a[c + (c >= skip)][r + 1];
    }
    const T term = a[skip][0] * determinant(rest);
    sum += skip % 2 == 0 ? term : -term;
  }
  return sum;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, R, C> transpose(matrix<T, C, R> a) {
  matrix<T, R, C> v;
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) v[r][c] = a[c][r];
  }
  return v;
}

}  // namespace metal

#define MM_MATRICES(T)                   \
  using T##2x2 = metal::matrix<T, 2, 2>; \
  using T##2x3 = metal::matrix<T, 2, 3>; \
  using T##2x4 = metal::matrix<T, 2, 4>; \
  using T##3x2 = metal::matrix<T, 3, 2>; \
  using T##3x3 = metal::matrix<T, 3, 3>; \
  using T##3x4 = metal::matrix<T, 3, 4>; \
  using T##4x2 = metal::matrix<T, 4, 2>; \
  using T##4x3 = metal::matrix<T, 4, 3>; \
  using T##4x4 = metal::matrix<T, 4, 4>;
MM_MATRICES(float)
MM_MATRICES(half)
MM_MATRICES(bfloat)
#undef MM_MATRICES
