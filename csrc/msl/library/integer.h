// <metal_integer>: bit counts, bit fields, wide multiplies; on scalars and vectors.
#pragma once

#include "math.h"

namespace metal {

namespace emulator {

// f on every component of the arguments.
template <class T, class F, class... More>
METAL_FUNC constexpr T each(F f, T x, More... more) {
  if constexpr (vector_of<T>::size == 1) {
    return f(x, more...);
  } else {
    T v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = f(static_cast<element_t<T>>(x[i]), static_cast<element_t<More>>(more[i])...);
    }
    return v;
  }
}
template <class T>
constexpr constant uint width_of = sizeof(element_t<T>) * 8;
template <class T>
using unsigned_t = make_unsigned_t<element_t<T>>;
#ifdef __SIZEOF_INT128__
using Widest = __int128;
using UnsignedWidest = unsigned __int128;
#else  // SPIR-V has none: no wide products and saturated sums of 64 bits there
using Widest = long;
using UnsignedWidest = ulong;
#endif
template <class T>  // of an element; holds every sum, and every product of 32 bits
using wide_t = conditional_t<is_unsigned_v<element_t<T>>, UnsignedWidest, Widest>;

}  // namespace emulator

MM_UNARY(popcount, __builtin_elementwise_popcount(x))
MM_UNARY(reverse_bits, __builtin_elementwise_bitreverse(x))
MM_BINARY(addsat, return __builtin_elementwise_add_sat(x, y))
MM_BINARY(subsat, return __builtin_elementwise_sub_sat(x, y))

template <class T>
METAL_FUNC constexpr T clz(T x) {
  return emulator::each(
      [](auto e) {
        return __builtin_clzg(static_cast<emulator::unsigned_t<T>>(e),
                              static_cast<int>(emulator::width_of<T>));
      },
      x);
}
template <class T>
METAL_FUNC constexpr T ctz(T x) {
  return emulator::each(
      [](auto e) {
        return __builtin_ctzg(static_cast<emulator::unsigned_t<T>>(e),
                              static_cast<int>(emulator::width_of<T>));
      },
      x);
}
// `bits` bits of x from `offset`, zero-extended (unsigned) or sign-extended (signed).
template <class T>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  return emulator::each(
      [=](auto e) {
        using E = decltype(e);
        if (bits == 0 || offset >= emulator::width_of<T>) return static_cast<E>(0);
        ulong u = static_cast<ulong>(static_cast<emulator::unsigned_t<T>>(e)) >> offset;
        if constexpr (is_unsigned_v<E>) {
          return static_cast<E>(bits >= 64 ? u : u & ((1ul << bits) - 1));
        } else {
          return static_cast<E>(static_cast<long>(u << (64 - bits)) >> (64 - bits));
        }
      },
      x);
}
template <class T>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  const ulong mask = (bits >= 64 ? ~0ul : (1ul << bits) - 1) << offset;
  return emulator::each(
      [=](auto b, auto i) {
        return static_cast<decltype(b)>((static_cast<ulong>(b) & ~mask) |
                                        ((static_cast<ulong>(i) << offset) & mask));
      },
      base, insert);
}
template <class T>
METAL_FUNC constexpr T rotate(T x, T by) {
  return emulator::each(
      [](auto e, auto n) {
        using U = emulator::unsigned_t<T>;
        const uint left = static_cast<U>(n) % emulator::width_of<T>;
        const auto u = static_cast<U>(e);
        return static_cast<decltype(e)>(
            left == 0
                ? u
                : static_cast<U>(u << left) | static_cast<U>(u >> (emulator::width_of<T> - left)));
      },
      x, by);
}
// The upper half of the product.
template <class T>
METAL_FUNC constexpr T mulhi(T x, T y) {
  return emulator::each(
      [](auto a, auto b) {
        return static_cast<decltype(a)>(
            (static_cast<emulator::wide_t<T>>(a) * static_cast<emulator::wide_t<T>>(b)) >>
            emulator::width_of<T>);
      },
      x, y);
}
template <class T>
METAL_FUNC constexpr T madhi(T x, T y, T z) {
  return mulhi(x, y) + z;
}
template <class T>
METAL_FUNC constexpr T madsat(T x, T y, T z) {
  return emulator::each(
      [](auto a, auto b, auto c) {
        using E = decltype(a);
        using W = emulator::wide_t<T>;
        const W sum = static_cast<W>(a) * static_cast<W>(b) + static_cast<W>(c);
        const W low = numeric_limits<E>::min(), high = numeric_limits<E>::max();
        return static_cast<E>(sum < low ? low : sum > high ? high : sum);
      },
      x, y, z);
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
METAL_FUNC constexpr auto absdiff(T a, T b) {
  using U = make_unsigned_t<T>;
  if constexpr (vector_of<T>::size == 1) {
    return static_cast<U>(a > b ? static_cast<U>(a) - static_cast<U>(b)
                                : static_cast<U>(b) - static_cast<U>(a));
  } else {
    vec<emulator::unsigned_t<T>, vector_of<T>::size> v{};
    for (int i = 0; i < vector_of<T>::size; ++i) {
      v[i] = absdiff(static_cast<element_t<T>>(a[i]), static_cast<element_t<T>>(b[i]));
    }
    return v;
  }
}
template <class T>
METAL_FUNC constexpr T hadd(T a, T b) {
  return (a & b) + ((a ^ b) >> 1);
}
template <class T>
METAL_FUNC constexpr T rhadd(T a, T b) {
  return (a | b) - ((a ^ b) >> 1);
}

}  // namespace metal
