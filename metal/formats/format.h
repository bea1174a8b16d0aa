// What a format gives the kernels: how a row is divided, and two ways to decode it.
//
// A format is a struct of static functions (in Metal 4.1 an implicit `this` becomes generic; static
// functions are immune) and constants:
//
//   kBlockValues, kBlockBytes   as in formats.def; 1 and the bytes of a value for dense formats
//   Row                         what finds the data of one row of W
//   static Row row(device const uchar* bytes, constant KernelArgs& args)
//
// Whole values, for gemm, embedding, dequantize and the baselines:
//   static void decode16(Row row, uint k, thread float (&w)[16])
//       w[i] = W[k + i], k a multiple of 16, rounded as the Python specification rounds it.
//       Dense formats read 16 values whatever K is, and have value(Row, k) for a tail.
//
// Pieces, for gemv. K is cut into units of kLanes * kValues values; each of kLanes lanes owns a
// piece of a unit: kValues values in runs of kRun, a run every kRunStride values, the first at
// first(piece). Lanes of a unit that are neighbours own neighbouring runs.
//   static uint first(uint piece)
//   static void load(Row row, uint unit, uint piece, Codebook book, thread Piece<Format>& p)
//       Codes as integers in f32, not yet scaled: value i of run r is
//         p.d * (kSegments == 1 ? 1 : p.scale[r]) * p.q[r * kRun + i]
//           + (kHasOffset ? p.m * (kSegments == 1 ? 1 : p.offset[r]) : 0)
//   kSegments                   1: one scale for the piece; else one per run
//   kHasCodebook                load() reads `book`, which fill() has written
//   static half level(uint code)  with kHasCodebook: the value of a 4-bit code
//
// Codes reach f32 without a conversion: a field of b bits at bit s of a 16-bit word, put into the
// mantissa of 2^23, is the float 2^23 + 2^s code, and one fma takes 2^23 and 2^s away (field()).
// The word gets its exponent once; a mask per field keeps exponent and field. So a code costs
// 1 bitwise + 1 fma, and 1 bitwise per word: no shift, no conversion. s + b <= 23.
// Above each struct: operations per weight of its load() and of dot(), and issue cycles by the
// costs of an M1 (1 for bitwise, float and select, 4 for shifts); loads are counted, not costed, x
// and what does not change along K left out.
//
// Two 16-bit words side by side give two fields at a time in half precision (pair()): 2^10 + 2^s
// code.
#pragma once

#include <metal_stdlib>

#include "../entry.h"

namespace metalmm {

using namespace metal;

// Two values of every byte of 4-bit codes, in threadgroup memory: low nibble, high nibble.
using Codebook = threadgroup const half2*;

template <class Format>
struct Piece {
  float q[Format::kValues];
  float scale[Format::kSegments], offset[Format::kSegments];
  float d, m;
};

// ---- mantissa tricks

MM_CONST uint kExponent23 = 0x4B000000;  // 2^23 as a float
MM_CONST uint kExponent10 = 0x64006400;  // 2^10 as two halves

METAL_FUNC uint open_word(uint word) { return word | kExponent23; }

// Shifts are template arguments, also where a loop would do: while a mask is not a constant yet, a
// compiler turns (w | e) & (e | mask) into (w & mask) | e, two operations per code instead of one.

// Code at bits [shift, shift + bits) of an opened word, plus `add` (an integer, |add| < 2^22).
template <int bits, int shift>
METAL_FUNC float field(uint opened, float add = 0.0f) {
  static_assert(shift + bits <= 23, "beyond the mantissa");
  constexpr uint kMask = kExponent23 | ((1u << bits) - 1u) << shift;
  constexpr float kUnit = 1.0f / (1u << shift);
  return fma(as_type<float>(opened & kMask), kUnit, add - 8388608.0f * kUnit);
}

// 2^10 + 2^shift code, for the codes at bits [shift, shift + bits) of both halves of a word.
METAL_FUNC uint open_pair(uint word) { return word | kExponent10; }
template <int bits, int shift>
METAL_FUNC half2 pair(uint opened) {
  static_assert(shift + bits <= 10, "beyond the mantissa");
  constexpr uint kMask = kExponent10 | (((1u << bits) - 1u) << shift) * 0x00010001u;
  return as_type<half2>(opened & kMask);
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
  return *(device const T*)p;
}
// 4, 8 and 16 bytes at an address of `alignment` bytes, in the widest loads that it allows.
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
  if constexpr (alignment >= 16) {
    return load_as<uint4>(p);
  } else {
    return uint4(load_8<alignment>(p), load_8<alignment>(p + 8));
  }
}
METAL_FUNC float load_half(device const uchar* p) { return float(load_as<half>(p)); }

// ---- nibbles

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

// ---- the dot product of a piece, the same for every kernel that promises equal bits

// x and the sums of its segments.
template <class Format>
struct XPiece {
  float x[Format::kValues], sum[Format::kSegments];
};

template <class Format>
METAL_FUNC void sum_segments(thread XPiece<Format>& x) {
  if constexpr (Format::kHasOffset) {
    constexpr int kValues = Format::kValues / Format::kSegments;
    MM_UNROLL
    for (int s = 0; s < Format::kSegments; ++s) {
      float sum = x.x[s * kValues];
      MM_UNROLL
      for (int i = 1; i < kValues; ++i) sum += x.x[s * kValues + i];
      x.sum[s] = sum;
    }
  }
}

// acc + sum of w x over a piece. One non-zero x gives w itself: q x, then scale q x, then d scale q
// x round only where the specification's d scale q does, and the offset is added once.
template <class Format>
METAL_FUNC float dot(thread const Piece<Format>& p, thread const XPiece<Format>& x, float acc) {
  constexpr int kValues = Format::kValues / Format::kSegments;
  float total = 0.0f, offset = 0.0f;
  MM_UNROLL
  for (int s = 0; s < Format::kSegments; ++s) {
    float sum = p.q[s * kValues] * x.x[s * kValues];
    MM_UNROLL
    for (int i = 1; i < kValues; ++i) {
      sum = fma(p.q[s * kValues + i], x.x[s * kValues + i], sum);
    }
    if constexpr (Format::kSegments == 1) {
      total = sum;
      if constexpr (Format::kHasOffset) offset = x.sum[0];
    } else {
      total = fma(p.scale[s], sum, total);
      if constexpr (Format::kHasOffset) offset = fma(p.offset[s], x.sum[s], offset);
    }
  }
  acc = fma(p.d, total, acc);
  if constexpr (Format::kHasOffset) acc = fma(p.m, offset, acc);
  return acc;
}

// Writes the codebook with all threads of a threadgroup; ends with a barrier.
template <class Format>
METAL_FUNC void fill(threadgroup half2* book, uint thread_index, uint threads) {
  if constexpr (Format::kHasCodebook) {
    for (uint byte = thread_index; byte < 256; byte += threads) {
      book[byte] = half2(Format::level(byte & 15), Format::level(byte >> 4));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A row of blocks is a pointer.
template <int values, int bytes>
struct BlockFormat {
  MM_CONST int kBlockValues = values, kBlockBytes = bytes;
  MM_CONST bool kHasCodebook = false, kIsDense = false;
  using Row = device const uchar*;
  static METAL_FUNC Row row(device const uchar* p, constant KernelArgs&) { return p; }
  static METAL_FUNC device const uchar* block(Row row, uint index) {
    return row + index * uint(bytes);
  }
};

}  // namespace metalmm
