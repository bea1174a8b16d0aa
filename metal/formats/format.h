// Formats for kernels: how a row is divided, and two ways to decode it.
//
// A format is a struct of static functions (in Metal 4.1 an implicit `this` becomes generic; static
// functions are immune), of constants, and of the structs that it is made of: Metal has no derived
// classes, so that a format names its members instead.
//
//   Storage          how a row lies in memory: Blocks or LaneBlocks (blocks.h), or the format's
//   own
//     kBlockValues, kBlockBytes   as in formats.def; 1 and the bytes of a value of dense formats;
//                                 affine formats: the smallest group, and the bytes of its codes
//     kHasWidths                  decode16 is a template of the width that Window reads at a time
//     static uint row_bytes()     of a packed row
//     Cursor                      finds the data of a unit of a row (piece.h)
//     static Cursor start(Row row, uint unit, uint piece), next(Cursor, uint units)
//     static Cursor moved(Cursor, long bytes)    the same unit of a row at that distance
//   kDecodesHalves   decode16 also takes half (&w)[16]
//   kHalvesAreExact  those are the f32 values rounded to half; else they may be rounded once, from
//                    the exact value
//
// Whole values, for gemm, embedding, dequantize and the baselines:
//   static void decode16(Row row, uint k, thread float (&w)[16])
//       w[i] = W[k + i], k a multiple of 16, rounded as the Python specification rounds it.
//       Dense formats read 16 values whatever K is, and have value(Row, k) for a tail.
//
// Pieces, for gemv, and the other constants: piece.h.
//
// Codes reach f32 without a conversion: a 16-bit word of codes, put into the mantissa of 2^23, is
// a float ("opened"), and so is the word with some of its fields masked away, exponent kept. All
// are integers below 2^24, so that differences are exact:
//   field()   masks one field of b bits at bit s: 2^23 + 2^s code; one fma takes 2^23 and 2^s away.
//             1 bitwise + 1 fma a code, and 1 bitwise a word.
//   chains    words that keep 1, 2, 3 ... fields: each code is the difference of neighbours, times
//             2^s, and the last word needs no mask: 1 bitwise less a word (nibbles4()).
// No shift, no conversion. s + b <= 23.
//
// Two 16-bit words side by side give two fields at a time in half precision (pair()): 2^10 + 2^s
// code.
#pragma once

#include <metal_stdlib>

#include "../entry.h"

namespace metalmm {

using namespace metal;

// The bytes of a row of W.
using Row = device const uchar*;

// ---- mantissa tricks

MM_CONST uint kExponent23 = 0x4B000000;  // 2^23 as a float
MM_CONST uint kExponent10 = 0x64006400;  // 2^10 as two halves
MM_CONST uint kExponent8 = 0x43800000;   // 2^8 as a float

METAL_FUNC uint open_word(uint word) { return word | kExponent23; }
METAL_FUNC ushort half_word(uint word, int i) { return as_type<ushort2>(word)[i]; }
METAL_FUNC float power_of_two(int e) { return as_type<float>(uint(e + 127) << 23); }

// Shifts are template arguments, also where a loop would do: while a mask is not a constant yet, a
// compiler turns (w | e) & (e | mask) into (w & mask) | e, two operations per code instead of one.

// Code at bits [shift, shift + bits) of an opened word, plus `add` (an integer, |add| < 2^22).
template <int bits, int shift>
METAL_FUNC float field(uint opened, float add = 0.0f) {
  static_assert(shift + bits <= 23, "beyond the mantissa");
  constexpr uint kMask = kExponent23 | ((1u << bits) - 1u) << shift;
  constexpr float kPlace = 1.0f / (1u << shift);
  return fma(as_type<float>(opened & kMask), kPlace, add - 8388608.0f * kPlace);
}

// 2^10 + 2^shift code, for the codes at bits [shift, shift + bits) of both halves of a word.
METAL_FUNC uint open_pair(uint word) { return word | kExponent10; }
template <int bits, int shift>
METAL_FUNC half2 pair(uint opened) {
  static_assert(shift + bits <= 10, "beyond the mantissa");
  constexpr uint kMask = kExponent10 | (((1u << bits) - 1u) << shift) * 0x00010001u;
  return as_type<half2>(opened & kMask);
}

// 2^(shift - 24) code of the same codes: bits below 2^10 are a subnormal half, whose unit is 2^-24.
// Exact, without an exponent to set and to take away, on a GPU that keeps such halves.
MM_CONST float kSubnormalUnit = 16777216.0f;
template <int bits, int shift>
METAL_FUNC half2 subnormals(uint word) {
  static_assert(shift + bits <= 10, "beyond the mantissa");
  return as_type<half2>(word & (((1u << bits) - 1u) << shift) * 0x00010001u);
}
// Subnormals of the four bytes of a word, a value of each every `stride`.
template <int bits, int shift, int stride = 1>
METAL_FUNC void subnormals4(uint word, thread float* q) {
  const half2 even = subnormals<bits, shift>(word), odd = subnormals<bits, shift>(word >> 8);
  q[0] = float(even.x);
  q[stride] = float(odd.x);
  q[2 * stride] = float(even.y);
  q[3 * stride] = float(odd.y);
}

// A byte of an opened 16-bit word as the upper 8 bits of a mantissa whose lowest is worth 1: field
// t of 2 bits is 4^t code on top of 2^8, 4 to 64 codes for all fields but the first. As little may
// stay there until a product has been summed (PieceTerms); 2^23 may not, and costs an operation a
// code. Moved by an fma: a shift takes four cycles.
MM_CONST int kCrumbBias = 256;
METAL_FUNC uint low_byte_on_top(uint opened) {
  return as_type<uint>(as_type<float>(opened & (kExponent23 | 0xFFu)) - (8388608.0f - 256.0f));
}
METAL_FUNC uint high_byte_on_top(uint opened) {
  return as_type<uint>(fma(as_type<float>(opened), 1 / 256.0f, 256.0f - 32768.0f));
}
template <int t>
METAL_FUNC float crumb_on_top(uint opened) {
  return as_type<float>(opened & (kExponent8 | 3u << (15 + 2 * t)));
}

// The fields of an opened word that masks a, b and c add one by one, and the rest of the word: a
// chain of four.
template <uint a, uint b, uint c>
METAL_FUNC void chain4(uint opened, thread float& q0, thread float& q1, thread float& q2,
                       thread float& q3) {
  const float v0 = as_type<float>(opened & (kExponent23 | a));
  const float v1 = as_type<float>(opened & (kExponent23 | b));
  const float v2 = as_type<float>(opened & (kExponent23 | c));
  q0 = v0 - 8388608.0f;
  q1 = v1 - v0;
  q2 = v2 - v1;
  q3 = as_type<float>(opened) - v2;
}
// The four nibbles of a 16-bit word times 1, 16, 256 and 4096.
METAL_FUNC void nibbles4(ushort word, thread float& q0, thread float& q1, thread float& q2,
                         thread float& q3) {
  chain4<0xF, 0xFF, 0xFFF>(as_type<uint>(ushort2(word, ushort(kExponent23 >> 16))), q0, q1, q2, q3);
}

// q + 2^to code, of one half h of pair<bits, shift>(): exact, in one fma if q already has
// pair_bias(to, shift) subtracted.
METAL_FUNC float pair_bias(int to, int shift) {
  return 1024.0f * float(1 << to) / float(1 << shift);
}
METAL_FUNC float add_pair(half h, int to, int shift, float q) {
  return fma(float(h), float(1 << to) / float(1 << shift), q);
}

// ---- loads

template <class T>
METAL_FUNC T load_as(device const uchar* p) {
  return *reinterpret_cast<device const T*>(p);
}
// 4, 8 and 16 bytes at an address of `alignment` bytes, in the widest loads up to 8 that it allows.
template <int alignment>
METAL_FUNC uint load_4(device const uchar* p) {
  if constexpr (alignment >= 4) {
    return load_as<uint>(p);
  } else {
    return as_type<uint>(ushort2(load_as<ushort>(p), load_as<ushort>(p + 2)));
  }
}
template <int alignment>
METAL_FUNC uint2 load_8(device const uchar* p) {
  if constexpr (alignment >= 8) {
    return load_as<uint2>(p);
  } else {
    return uint2(load_4<alignment>(p), load_4<alignment>(p + 4));
  }
}
template <int alignment>
METAL_FUNC uint4 load_16(device const uchar* p) {
  return uint4(load_8<alignment>(p), load_8<alignment>(p + 8));
}
// 16 bytes at p. One value where both ways meet: loads of scalars from one address are the same to
// a compiler, which merges them, of the lesser alignment, and the function constant that could tell
// them apart has its value only later. (clang 22, f32 x: 16 loads of 4 bytes instead of 4 of 16,
// and 67 us instead of 24 for q4_k, 14336 x 4096, on an H200.)
template <int value_bytes>
METAL_FUNC uint4 load_16_of(device const uchar* p, bool is_aligned) {
  if (is_aligned) return load_as<uint4>(p);
  return load_16<value_bytes>(p);
}
template <int value_bytes>
METAL_FUNC uint2 load_8_of(device const uchar* p, bool is_aligned) {
  if (is_aligned) return load_as<uint2>(p);
  return load_8<value_bytes>(p);
}
// Words for codes that are opened one by one: as wide loads these would be put together and taken
// apart again.
METAL_FUNC ushort4 load_ushort4(device const uchar* p) {
  return ushort4(load_as<ushort>(p), load_as<ushort>(p + 2), load_as<ushort>(p + 4),
                 load_as<ushort>(p + 6));
}
METAL_FUNC float load_half(device const uchar* p) { return float(load_as<half>(p)); }

// ---- nibbles

// 32 codes of 16 bytes as chains of two (kChainBits 8): low nibbles in low[i], then high ones times
// 16 in high[i].
METAL_FUNC void nibbles16x2(uint4 words, thread float* low, thread float* high) {
  MM_UNROLL
  for (int i = 0; i < 16; i += 2) {
    const ushort half_word = as_type<ushort2>(words[i / 4])[i / 2 % 2];
    nibbles4(half_word, low[i], high[i], low[i + 1], high[i + 1]);
  }
}

// 32 codes of 16 bytes as subnormal halves: low nibbles, then high ones times 16.
METAL_FUNC void subnormals16x2(uint4 words, thread float (&q)[32]) {
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    subnormals4<4, 0>(words[i], q + 4 * i);
    subnormals4<4, 4>(words[i], q + 16 + 4 * i);
  }
}

// The codes of 16 bytes, plus an integer: low or high nibbles.
METAL_FUNC void nibbles16(uint4 words, bool high, float add, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const ushort2 halves = as_type<ushort2>(words[i] >> (high ? 4 : 0));
    MM_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint u = open_word(halves[j]);
      q[4 * i + 2 * j] = field<4, 0>(u, add);
      q[4 * i + 2 * j + 1] = field<4, 8>(u, add);
    }
  }
}

// 16 bytes, plus an integer, the bits `flipped` of every two inverted. Inverted here, where the
// exponent is set: on whole words it is an operation more for every 4 bytes.
template <uint flipped = 0>
METAL_FUNC void bytes16(uint4 words, float add, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint u = half_word(words[i / 2], i % 2) ^ (kExponent23 | flipped);
    q[2 * i] = field<8, 0>(u, add);
    q[2 * i + 1] = field<8, 8>(u, add);
  }
}

// w = d w + m, rounded once: as a product and a sum, where the product is exact.
// m = -0 adds nothing, also to -0: +0 would turn it into +0.
METAL_FUNC void scale16(float d, float m, thread float (&w)[16]) {
  MM_UNROLL
  for (int i = 0; i < 16; ++i) w[i] = fma(d, w[i], m);
}

// ---- pairs of halves
//
// Halves are decoded two at a time, values i and i + 8 side by side: a lane of gemm_small
// multiplies by such pairs as they are (gemm packs neighbours again, from any order).

// Word i: bytes 2 i and 2 i + 1, then those 8 behind.
METAL_FUNC uint4 eight_apart(uint4 words) {
  uint4 out;
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[i] =
        as_type<uint>(ushort2(half_word(words[i / 2], i % 2), half_word(words[i / 2 + 2], i % 2)));
  }
  return out;
}
// Codes 0 and 8, 1 and 9, of w, times d: a product of two halves rounds once, as the f32 product
// does when it becomes a half.
METAL_FUNC void scale_two(half2 even, half2 odd, half d, thread half* w) {
  even *= half2(d);
  odd *= half2(d);
  w[0] = even.x;
  w[1] = odd.x;
  w[8] = even.y;
  w[9] = odd.y;
}
METAL_FUNC void nibbles16(uint4 words, bool high, half add, half d, thread half (&w)[16]) {
  const uint mask = kExponent10 | (high ? 0x00F000F0u : 0x000F000Fu);
  const half place = high ? 1 / 16.0h : 1.0h, bias = add - 1024.0h * place;
  const uint4 pairs = eight_apart(words);
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const half2 even = as_type<half2>(open_pair(pairs[i]) & mask);
    const half2 odd = as_type<half2>(open_pair(pairs[i] >> 8) & mask);
    scale_two(fma(even, half2(place), half2(bias)), fma(odd, half2(place), half2(bias)), d,
              w + 2 * i);
  }
}

}  // namespace metalmm
