// Formats whose 4-bit codes are indices of a table: iq4_nl, iq4_xs, mxfp4.
// gemv keeps the values of both nibbles of every byte in threadgroup memory: a byte of codes is one
// lookup for two weights, with no conversion. Rejected: the table in the constant address space,
// whose reads serialise where lanes differ.
#pragma once

#include "block32.h"
#include "blocks.h"

namespace metalmm {

MM_CONST half kIQ4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
// Twice the FP4 values; the scale is halved, so that its largest, 2^128, is finite.
MM_CONST half kFP4Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct IQ4Levels {
  static METAL_FUNC half level(uint code) { return kIQ4Levels[code]; }
};
struct FP4Levels {
  static METAL_FUNC half level(uint code) { return kFP4Doubled[code]; }
};

// The 2 kBytes values of kBytes bytes of codes: low nibbles, then high ones.
template <int kBytes>
METAL_FUNC void look_up(Codebook book, thread const uint* words, thread float* q) {
  MM_UNROLL
  for (int i = 0; i < kBytes; i += 2) {  // bytes of a word: 0 and 2, then 1 and 3
    const uint pair = i % 4 == 0 ? words[i / 4] : words[i / 4] >> 8;
    const ushort2 bytes = as_type<ushort2>(pair & 0x00FF00FFu);
    MM_UNROLL
    for (int j = 0; j < 2; ++j) {
      const half2 both = book[bytes[j]];
      const int at = i / 4 * 4 + i % 4 / 2 + 2 * j;
      q[at] = float(both.x);
      q[kBytes + at] = float(both.y);
    }
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
struct IQ4_NL {
  using Storage = Q4_0::Storage;
  using Pieces = Pieces32;
  using Terms = PieceTerms<1>;
  using Levels = IQ4Levels;
  MM_CONST bool kHasCodebook = true, kDecodesHalves = false, kHalvesAreExact = true;
  using Raw = Q4_0::Raw;
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    Q4_0::fetch(c, piece, raw);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook book,
                                thread Piece<IQ4_NL>& p) {
    const uint2 codes = as_type<uint2>(raw.codes);
    const uint words[2] = {codes.x, codes.y};
    look_up<8>(book, words, p.q);
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const Window<18> bytes = Window<18>::load<width>(row, k / 32 * 18);
    look_up16<Levels>(bytes.four<2>(bytes), k & 16, w);
    scale16(float(bytes.first(bytes)), -0.0f, w);
  }
};

// (d (scale - 32)) level(code): 6-bit scales per 32 values, codes as in iq4_nl.
// Eight lanes share a block: lane p owns group p.
struct IQ4_XS {
  struct Lane {
    MM_CONST int kParts = 3;
    static METAL_FUNC uint at(int part, uint piece) {
      return part == 0 ? 0 : part == 1 ? 8 + 16 * piece : 4 + piece / 2;
    }
  };
  using Storage = LaneBlocks<256, 136, Lane>;
  using Pieces = PieceLayout<8, 32, 32, 32>;
  using Terms = PieceTerms<1>;
  using Levels = IQ4Levels;
  MM_CONST bool kHasCodebook = true, kDecodesHalves = false, kHalvesAreExact = true;

  static METAL_FUNC float scale(device const uchar* b, uint group) {
    const uint low = b[4 + group / 2] >> (4 * (group & 1)) & 15;
    const uint top = load_as<ushort>(b + 2) >> (2 * group) & 3;
    const half six = as_type<half>(ushort(0x6400u | low | top << 4));
    return load_half(b) * (float(six) - 1056.0f);
  }
  struct Raw {
    uint4 codes;
    half d;
    ushort tops, low;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    device const uchar* b = Storage::part(c, 0, piece);
    raw = {load_16<8>(Storage::part(c, 1, piece)), load_as<half>(b), load_as<ushort>(b + 2),
           Storage::part(c, 2, piece)[0]};
  }
  // A lane's fields of `low` and `tops` are at bits that it knows: masks and places are its own.
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook book,
                                thread Piece<IQ4_XS>& p) {
    const uint words[4] = {raw.codes.x, raw.codes.y, raw.codes.z, raw.codes.w};
    look_up<16>(book, words, p.q);
    const uint low_shift = 4 * (piece & 1), top_shift = 2 * piece;
    const float low_place = power_of_two(-int(low_shift));
    const float top_place = power_of_two(4 - int(top_shift));
    const half low = as_type<half>(ushort((raw.low | 0x6400u) & (0x6400u | 15u << low_shift)));
    const float top = as_type<float>(open_word(raw.tops) & (kExponent23 | 3u << top_shift));
    const float bias = -32.0f - 8388608.0f * top_place - 1024.0f * low_place;
    p.d = float(raw.d) * fma(float(low), low_place, fma(top, top_place, bias));
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint group = (k & 255) / 32;
    look_up16<Levels>(load_16<8>(b + 8 + 16 * group), k & 16, w);
    scale16(scale(b, group), -0.0f, w);
  }
};

// 2^(e - 127) * fp4(code). Blocks of 17 bytes: byte loads, and a byte is what the codebook takes.
struct MXFP4 {
  using Storage = LaneBlocks<32, 17, LaneOfCodes<1, 8>>;
  using Pieces = Pieces32;
  using Terms = PieceTerms<1>;
  using Levels = FP4Levels;
  MM_CONST bool kHasCodebook = true, kDecodesHalves = false, kHalvesAreExact = true;

  // 2^(e - 128); subnormal for e < 2.
  static METAL_FUNC float scale(uint e) {
    return as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  struct Raw {
    uchar codes[8], e;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw.e = Storage::part(c, 0, piece)[0];
    MM_UNROLL
    for (int i = 0; i < 8; ++i) raw.codes[i] = Storage::part(c, 1, piece)[i];
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook book,
                                thread Piece<MXFP4>& p) {
    MM_UNROLL
    for (int i = 0; i < 8; ++i) {
      const half2 both = book[raw.codes[i]];
      p.q[i] = float(both.x);
      p.q[8 + i] = float(both.y);
    }
    p.d = scale(raw.e);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 32);
    const float d = scale(b[0]);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = d * float(Levels::level(b[1 + i] >> (k & 16 ? 4 : 0) & 15));
  }
};

}  // namespace metalmm
