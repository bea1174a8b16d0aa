// <metal_array>, <metal_uniform>.
#pragma once

#include "language/types.h"

namespace metal {

template <class T, unsigned long N>
struct array {
  T elements[N ? N : 1];

  constexpr unsigned long size() const { return N; }
  constexpr bool empty() const { return N == 0; }
  constexpr thread T& operator[](unsigned long i) { return elements[i]; }
  constexpr const thread T& operator[](unsigned long i) const { return elements[i]; }
};

// A value that all threads of a grid agree on: nothing is gained from it here.
template <class T>
using uniform = T;
template <class T>
METAL_FUNC constexpr T make_uniform(T x) {
  return x;
}

}  // namespace metal
