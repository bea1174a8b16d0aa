// Of <metal_simdgroup>, what does not depend on how lanes meet: the operators of reductions and
// prefixes, votes, and the flags of barriers.
#pragma once

#include "integer.h"

namespace metal {
namespace simd_operators {

struct Sum {
  template <class T>
  static METAL_FUNC T of(T a, T b) {
    return a + b;
  }
  template <class T>
  static METAL_FUNC T identity() {
    return construct<T>(0);
  }
};
struct Product {
  template <class T>
  static METAL_FUNC T of(T a, T b) {
    return a * b;
  }
  template <class T>
  static METAL_FUNC T identity() {
    return construct<T>(1);
  }
};
struct Smallest {
  template <class T>
  static METAL_FUNC T of(T a, T b) {
    return min(a, b);
  }
};
struct Largest {
  template <class T>
  static METAL_FUNC T of(T a, T b) {
    return max(a, b);
  }
};
// Of floats, their bits.
#define MM_BITWISE(Name, op)                                                        \
  struct Name {                                                                     \
    template <class T>                                                              \
    static METAL_FUNC T of(T a, T b) {                                              \
      if constexpr (is_floating_point_v<T>) {                                       \
        using Bits = conditional_t<sizeof(T) == 4, uint, ushort>;                   \
        return as_type<T>(static_cast<Bits>(as_type<Bits>(a) op as_type<Bits>(b))); \
      } else {                                                                      \
        return a op b;                                                              \
      }                                                                             \
    }                                                                               \
  };
MM_BITWISE(And, &)
MM_BITWISE(Or, |)
MM_BITWISE(Xor, ^)
#undef MM_BITWISE

// The lanes of a group that voted true.
template <uint Width>
struct Vote {
  using vote_t = ulong;
  ulong mask;
  constexpr Vote(ulong m = 0) : mask(m) {}
  constexpr explicit operator vote_t() const { return mask; }
  constexpr bool all() const { return mask == (1ul << Width) - 1; }
  constexpr bool any() const { return mask != 0; }
};

}  // namespace simd_operators

using simd_vote = simd_operators::Vote<32>;
using quad_vote = simd_operators::Vote<4>;

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}

}  // namespace metal
