// <metal_integer>, <metal_pack>: bit counts, bit fields, wide multiplies, packed conversions.
#pragma once

#include "math.h"

namespace metal {

// f on every component.
template <class T, class F>
METAL_FUNC constexpr T each(T x, F f) {
  if constexpr (vector_of<T>::size == 1) {
    return f(x);
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = f(static_cast<element_t<T>>(x[i]));
    }
    return v;
  }
}

template <class T>
METAL_FUNC constexpr T clz(T x) {
  return each(x, [](element_t<T> e) {
    return static_cast<element_t<T>>(
        __builtin_clzg(static_cast<make_unsigned_t<element_t<T>>>(e), int(sizeof(e) * 8)));
  });
}
template <class T>
METAL_FUNC constexpr T ctz(T x) {
  return each(x, [](element_t<T> e) {
    return static_cast<element_t<T>>(
        __builtin_ctzg(static_cast<make_unsigned_t<element_t<T>>>(e), int(sizeof(e) * 8)));
  });
}
// `bits` bits of x from `offset`, zero-extended (unsigned) or sign-extended (signed).
template <class T>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  return each(x, [=](element_t<T> e) {
    constexpr uint width = sizeof(e) * 8;
    if (bits == 0 || offset >= width) {
      return static_cast<element_t<T>>(0);
    }
    auto u = static_cast<ulong>(static_cast<make_unsigned_t<element_t<T>>>(e)) >> offset;
    if constexpr (is_unsigned_v<element_t<T>>) {
      return static_cast<element_t<T>>(bits >= 64 ? u : u & ((1ul << bits) - 1));
    } else {
      return static_cast<element_t<T>>(static_cast<long>(u << (64 - bits)) >> (64 - bits));
    }
  });
}
template <class T>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = static_cast<T>((bits >= sizeof(T) * 8 ? ~T(0) : static_cast<T>((T(1) << bits) - 1))
                          << offset);
  return static_cast<T>((base & ~mask) | ((insert << offset) & mask));
}
template <class T>
METAL_FUNC constexpr T rotate(T x, T by) {
  constexpr int width = sizeof(element_t<T>) * 8;
  using U = make_unsigned_t<T>;
  U n = static_cast<U>(by) % width;
  return static_cast<T>(n == 0 ? static_cast<U>(x)
                               : (static_cast<U>(x) << n) | (static_cast<U>(x) >> (width - n)));
}
// The upper half of the product.
template <class T>
METAL_FUNC constexpr T mulhi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = conditional_t<is_unsigned_v<T>, unsigned __int128, __int128>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> 64);
  } else {
    using Wide = conditional_t<is_unsigned_v<T>, ulong, long>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (sizeof(T) * 8));
  }
}
template <class T>
METAL_FUNC constexpr T mul24(T a, T b) {
  return a * b;
}
template <class T>
METAL_FUNC constexpr T mad24(T a, T b, T c) {
  return a * b + c;
}
template <class T>
METAL_FUNC constexpr T absdiff(T a, T b) {
  return a > b ? a - b : b - a;
}
template <class T>
METAL_FUNC constexpr T hadd(T a, T b) {
  return (a & b) + ((a ^ b) >> 1);
}

METAL_FUNC float4 unpack_unorm4x8_to_float(uint x) {
  return construct<float4>(as_type<uchar4>(x)) / 255.0f;
}
METAL_FUNC float4 unpack_snorm4x8_to_float(uint x) {
  return max(construct<float4>(as_type<char4>(x)) / 127.0f, -1.0f);
}
METAL_FUNC half4 unpack_unorm4x8_to_half(uint x) {
  return construct<half4>(unpack_unorm4x8_to_float(x));
}
METAL_FUNC float2 unpack_unorm2x16_to_float(uint x) {
  return construct<float2>(as_type<ushort2>(x)) / 65535.0f;
}
METAL_FUNC float2 unpack_snorm2x16_to_float(uint x) {
  return max(construct<float2>(as_type<short2>(x)) / 32767.0f, -1.0f);
}
METAL_FUNC uint pack_float_to_unorm4x8(float4 x) {
  return as_type<uint>(construct<uchar4>(rint(saturate(x) * 255.0f)));
}
METAL_FUNC uint pack_float_to_snorm4x8(float4 x) {
  return as_type<uint>(construct<char4>(rint(clamp(x, -1.0f, 1.0f) * 127.0f)));
}

}  // namespace metal
