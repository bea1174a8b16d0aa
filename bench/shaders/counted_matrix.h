// <metal_simdgroup_matrix> for counting (csrc/msl/spirv/simdgroup_matrix.h): a product of 8 x 8
// matrices is one instruction of PTX that no assembler knows.
#pragma once

#include <metal_stdlib>

#include "library/array.h"
#include "library/integer.h"
#include "library/matrix.h"
#include "library/pack.h"
#include "spirv/simdgroup_matrix.h"

namespace metal {
#ifndef __SPIRV__
namespace counted {

// Operands of 16 bits are a register each, of 32 bits two.
template <class A, class B>
METAL_FUNC vec<float, 2> product(vec<A, 2> a, vec<B, 2> b, vec<float, 2> c) {
  if constexpr (sizeof(A) == 2 && sizeof(B) == 2) {
    asm("simdgroup_product.b16 {%0,%1}, %2, %3;"
        : "+f"(c.x), "+f"(c.y)
        : "r"(as_type<uint>(a)), "r"(as_type<uint>(b)));
  } else {
    const auto left = construct<vec<float, 2>>(a), right = construct<vec<float, 2>>(b);
    asm("simdgroup_product.b32 {%0,%1}, {%2,%3}, {%4,%5};"
        : "+f"(c.x), "+f"(c.y)
        : "f"(left.x), "f"(left.y), "f"(right.x), "f"(right.y));
  }
  return c;
}

}  // namespace counted
#endif

// What a translated text calls where C++ neither reads nor assigns in another address space: in
// words as long as the size allows, whatever alignment the type has.
namespace emulator {

template <uint size>
using Word = conditional_t<
    size % 16 == 0, vec<uint, 4>,
    conditional_t<size % 8 == 0, vec<uint, 2>, conditional_t<size % 4 == 0, uint, uchar>>>;
#define MM_COUNTED_STRUCTS(space)                            \
  template <class T, class W = Word<sizeof(T)>>              \
  METAL_FUNC T load(const space T& from) {                   \
    W words[sizeof(T) / sizeof(W)];                          \
    for (uint i = 0; i < sizeof(T) / sizeof(W); ++i) {       \
      words[i] = reinterpret_cast<const space W*>(&from)[i]; \
    }                                                        \
    T to;                                                    \
    __builtin_memcpy(&to, words, sizeof(T));                 \
    return to;                                               \
  }                                                          \
  template <class T, class W = Word<sizeof(T)>>              \
  METAL_FUNC void store(space T& to, T value) {              \
    W words[sizeof(T) / sizeof(W)];                          \
    __builtin_memcpy(words, &value, sizeof(T));              \
    for (uint i = 0; i < sizeof(T) / sizeof(W); ++i) {       \
      reinterpret_cast<space W*>(&to)[i] = words[i];         \
    }                                                        \
  }
MM_COUNTED_STRUCTS(device)
MM_COUNTED_STRUCTS(threadgroup)
#undef MM_COUNTED_STRUCTS

}  // namespace emulator
}  // namespace metal
