// Of <metal_simdgroup>, what does not depend on how lanes meet: the operators of reductions and
// prefixes, votes, the flags of barriers, and the list of functions.
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

// Every function that is made by a macro of the file that includes this: MM_REDUCE(name, group,
// Width, Op), MM_PREFIX(name, group, Width, Op, inclusive), MM_SHUFFLE(name, group, Width, from),
// `from` being an expression of n, me (the number of the lane in its group) and Width.
#define MM_EACH_LANE_FUNCTION(group, Width)                                     \
  MM_REDUCE(sum, group, Width, Sum)                                             \
  MM_REDUCE(product, group, Width, Product)                                     \
  MM_REDUCE(min, group, Width, Smallest)                                        \
  MM_REDUCE(max, group, Width, Largest)                                         \
  MM_REDUCE(and, group, Width, And)                                             \
  MM_REDUCE(or, group, Width, Or)                                               \
  MM_REDUCE(xor, group, Width, Xor)                                             \
  MM_PREFIX(inclusive_sum, group, Width, Sum, true)                             \
  MM_PREFIX(exclusive_sum, group, Width, Sum, false)                            \
  MM_PREFIX(inclusive_product, group, Width, Product, true)                     \
  MM_PREFIX(exclusive_product, group, Width, Product, false)                    \
  MM_SHUFFLE(shuffle, group, Width, n % Width)                                  \
  MM_SHUFFLE(broadcast, group, Width, n % Width)                                \
  MM_SHUFFLE(shuffle_xor, group, Width, (me ^ n) % Width)                       \
  MM_SHUFFLE(shuffle_up, group, Width, me - n)                                  \
  MM_SHUFFLE(shuffle_down, group, Width, me + n)                                \
  MM_SHUFFLE(shuffle_rotate_up, group, Width, (me + Width - n % Width) % Width) \
  MM_SHUFFLE(shuffle_rotate_down, group, Width, (me + n) % Width)
