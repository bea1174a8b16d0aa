// nvfp4 and mxfp8: small floats with small floats for scales, in blocks of 64 values, 16 to a lane.
// e4m3 has sign, 4 bits of exponent (bias 7), 3 of mantissa. In the upper 10 bits of an f16, whose
// bias is 15, it is 2^-8 of its value, subnormals too.
#pragma once

#include "codebook.h"

namespace metalmm {

using QuartersOf64 = PieceLayout<4, 16, 16, 16>;

// s / 2 * level(code), twice the levels: s e4m3 of 16 values, from byte 0; from byte 4 8 bytes of
// codes for each s, value j in the low nibble of byte j and j + 8 in the high one.
struct NVFP4 {
  struct Lane {
    MM_CONST int kParts = 2;
    static METAL_FUNC uint at(int part, uint piece) { return part == 0 ? piece : 4 + 8 * piece; }
  };
  using Storage = LaneBlocks<64, 36, Lane>;
  using Pieces = QuartersOf64;
  using Terms = PieceTerms<1>;
  using Levels = FP4Levels;
  MM_CONST bool kHasCodebook = true, kDecodesHalves = false, kHalvesAreExact = true;

  // The sign of s is ignored, and 0x7F is 0.
  static METAL_FUNC float scale(uint s) {
    return s == 0x7F ? 0.0f : float(as_type<half>(ushort((s & 0x7F) << 7))) * 128.0f;
  }
  struct Raw {
    uint2 codes;
    uchar s;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw = {load_8<4>(Storage::part(c, 1, piece)), Storage::part(c, 0, piece)[0]};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook book,
                                thread Piece<NVFP4>& p) {
    const uint words[2] = {raw.codes.x, raw.codes.y};
    look_up<8>(book, words, p.q);
    p.d = scale(raw.s);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 64);
    const uint group = (k & 63) / 16;
    const uint2 codes = load_8<4>(b + 4 + 8 * group);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) {
      w[i] = float(Levels::level(codes[i / 4 % 2] >> (i % 4 * 8 + i / 8 * 4) & 15));
    }
    scale16(scale(b[group]), -0.0f, w);
  }
};

// 2^(e - 127) * code: e of 32 values, from byte 0; codes e4m3 from byte 2.
struct MXFP8 {
  struct Lane {
    MM_CONST int kParts = 2;
    static METAL_FUNC uint at(int part, uint piece) {
      return part == 0 ? piece / 2 : 2 + 16 * piece;
    }
  };
  using Storage = LaneBlocks<64, 66, Lane>;
  using Pieces = QuartersOf64;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;

  // Subnormal for e = 0.
  static METAL_FUNC float scale(uint e) { return as_type<float>(e == 0 ? 0x00400000u : e << 23); }
  // Codes in the upper bytes of two halves.
  static METAL_FUNC half2 two(uint word) {
    return as_type<half2>((word >> 1 & 0x3F803F80u) | (word & 0x80008000u)) * half2(256.0h);
  }
  static METAL_FUNC void e4m3x16(uint4 words, thread float (&q)[16]) {
    MM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const half2 even = two(words[i] << 8), odd = two(words[i]);
      q[4 * i] = float(even.x);
      q[4 * i + 1] = float(odd.x);
      q[4 * i + 2] = float(even.y);
      q[4 * i + 3] = float(odd.y);
    }
  }
  struct Raw {
    uint4 codes;
    uchar e;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw = {load_16<2>(Storage::part(c, 1, piece)), Storage::part(c, 0, piece)[0]};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<MXFP8>& p) {
    e4m3x16(raw.codes, p.q);
    p.d = scale(raw.e);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 64);
    const uint group = (k & 63) / 16;
    e4m3x16(load_16<2>(b + 2 + 16 * group), w);
    scale16(scale(b[group / 2]), -0.0f, w);
  }
};

}  // namespace metalmm
