// What texts of other projects need beside <metal_stdlib> to become SPIR-V.
#pragma once

#include <metal_stdlib>

#include "library/integer.h"

// What a translated text calls where C++ neither reads nor assigns in another address space: in
// words as long as the size allows, whatever alignment the type has.
namespace metal::emulator {

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

}  // namespace metal::emulator
