// Formats whose 4-bit codes are indices of a table: iq4_nl, iq4_xs, mxfp4.
// gemv keeps the values of both nibbles of every byte in threadgroup memory: a byte of codes is one
// lookup for two weights, with no conversion. Rejected: the table in the constant address space,
// whose reads serialise where lanes differ.
#pragma once

#include "block32.h"

namespace metalmm {

constant half kIQ4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
// Twice the FP4 values; the scale is halved, so that its largest, 2^128, is finite.
constant half kFP4Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct IQ4Levels {
  MM_CONST bool kHasCodebook = true;
  static METAL_FUNC half level(uint code) { return kIQ4Levels[code]; }
};

// Byte i of the codes: values i and 8 + i of a piece.
METAL_FUNC void look_up8x2(Codebook book, uint byte, int i, thread float (&q)[16]) {
  const half2 both = book[byte];
  q[i] = float(both.x);
  q[8 + i] = float(both.y);
}
METAL_FUNC void look_up8x2(Codebook book, uint2 words, thread float (&q)[16]) {
  const ushort4 halves = as_type<ushort4>(words);
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    look_up8x2(book, halves[i] & 0xFF, 2 * i, q);
    look_up8x2(book, halves[i] >> 8, 2 * i + 1, q);
  }
}
template <class Levels>
METAL_FUNC void look_up16(uint4 words, bool high, thread float (&w)[16]) {
  MM_UNROLL
  for (int i = 0; i < 16; ++i) {
    w[i] = float(Levels::level(words[i / 4] >> (i % 4 * 8 + (high ? 4 : 0)) & 15));
  }
}

// d * level(code).
// 0.3 bitwise, 0.25 shift, 1.06 fma, 0.81 load: 2.4 cycles.
struct IQ4_NL : Block32<18>, IQ4Levels {
  MM_CONST bool kHasOffset = false, kHasCodebook = true;
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook book,
                              thread Piece<IQ4_NL>& p) {
    device const uchar* b = block(row, unit);
    look_up8x2(book, load_8<2>(b + 2 + 8 * piece), p.q);
    p.d = load_half(b);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 32);
    look_up16<IQ4Levels>(load_16<2>(b + 2), k & 16, w);
    scale16(load_half(b), 0, w);
  }
};

// (d (scale - 32)) level(code): 6-bit scales per 32 values, codes as in iq4_nl.
// Sixteen lanes share a super-block, two to a sub-block of 32.
// 0.6 bitwise, 0.44 shift, 1.2 fma, 0.75 load: 3.5 cycles.
struct IQ4_XS : BlockFormat<256, 136>, IQ4Levels {
  MM_CONST int kLanes = 16, kValues = 16, kRun = 8, kRunStride = 16, kSegments = 1;
  MM_CONST bool kHasOffset = false, kHasCodebook = true;
  static METAL_FUNC uint first(uint piece) { return 32 * (piece / 2) + 8 * (piece & 1); }

  static METAL_FUNC float scale(device const uchar* b, uint sub) {
    const uint low = b[4 + sub / 2] >> (4 * (sub & 1)) & 15;
    const uint top = load_as<ushort>(b + 2) >> (2 * sub) & 3;
    const half six = as_type<half>(ushort(0x6400u | low | top << 4));
    return load_half(b) * (float(six) - 1056.0f);
  }
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook book,
                              thread Piece<IQ4_XS>& p) {
    device const uchar* b = block(row, unit);
    look_up8x2(book, load_8<8>(b + 8 + 8 * piece), p.q);
    p.d = scale(b, piece / 2);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    const uint sub = (k & 255) / 32;
    look_up16<IQ4Levels>(load_16<8>(b + 8 + 16 * sub), k & 16, w);
    scale16(scale(b, sub), 0, w);
  }
};

// 2^(e - 127) * fp4(code). Blocks of 17 bytes: byte loads, and a byte is what the codebook takes.
// 0.4 bitwise, 0.12 select, 0.12 shift, 1.06 fma, 1.06 load: 2.1 cycles.
struct MXFP4 : Block32<17> {
  MM_CONST bool kHasOffset = false, kHasCodebook = true;
  static METAL_FUNC half level(uint code) { return kFP4Doubled[code]; }

  // 2^(e - 128); subnormal for e < 2.
  static METAL_FUNC float scale(uint e) {
    return as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook book,
                              thread Piece<MXFP4>& p) {
    device const uchar* b = block(row, unit);
    MM_UNROLL
    for (int i = 0; i < 8; ++i) look_up8x2(book, b[1 + 8 * piece + i], i, p.q);
    p.d = scale(b[0]);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 32);
    const float d = scale(b[0]);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = d * float(level(b[1 + i] >> (k & 16 ? 4 : 0) & 15));
  }
};

}  // namespace metalmm
