// The part of <metal_simdgroup> that does not depend on how lanes meet: the operators of reductions
// and prefixes, votes, the flags of barriers, and the list of functions.
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
// The bits of floats.
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

// The lanes of a scope, a simdgroup or a quadgroup, that voted true.
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

// Every function that is made by a macro of the file that includes this: MM_REDUCE(name, group,
// Width, Op), MM_PREFIX(name, scope, Width, Op, inclusive), MM_SHUFFLE(name, scope, Width, from),
// `from` being an expression of n, me (the number of the lane in its scope) and Width.
#define MM_EACH_LANE_FUNCTION(scope, Width)                                     \
  MM_REDUCE(sum, scope, Width, Sum)                                             \
  MM_REDUCE(product, scope, Width, Product)                                     \
  MM_REDUCE(min, scope, Width, Smallest)                                        \
  MM_REDUCE(max, scope, Width, Largest)                                         \
  MM_REDUCE(and, scope, Width, And)                                             \
  MM_REDUCE(or, scope, Width, Or)                                               \
  MM_REDUCE(xor, scope, Width, Xor)                                             \
  MM_PREFIX(inclusive_sum, scope, Width, Sum, true)                             \
  MM_PREFIX(exclusive_sum, scope, Width, Sum, false)                            \
  MM_PREFIX(inclusive_product, scope, Width, Product, true)                     \
  MM_PREFIX(exclusive_product, scope, Width, Product, false)                    \
  MM_SHUFFLE(shuffle, scope, Width, n % Width)                                  \
  MM_SHUFFLE(broadcast, scope, Width, n % Width)                                \
  MM_SHUFFLE(shuffle_xor, scope, Width, (me ^ n) % Width)                       \
  MM_SHUFFLE(shuffle_up, scope, Width, me - n)                                  \
  MM_SHUFFLE(shuffle_down, scope, Width, me + n)                                \
  MM_SHUFFLE(shuffle_rotate_up, scope, Width, (me + Width - n % Width) % Width) \
  MM_SHUFFLE(shuffle_rotate_down, scope, Width, (me + n) % Width)
