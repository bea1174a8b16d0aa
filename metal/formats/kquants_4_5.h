// q4_k and q5_k: blocks of 256 values, 6-bit scales and minima per 32.
// Bytes [32c, 32c + 32) of the codes hold values [64c, 64c + 32) (low nibbles) and the next 32
// (high). 16 bytes of them are a lane's: lane p owns those from 16 p, of weave c = p / 2.
#pragma once

#include "blocks.h"
#include "piece.h"

namespace metalmm {

using HalvesOf64 = PieceLayout<8, 32, 16, 32>;

// The two packed scales and minima of weave c, of values [64c, 64c + 32) and [64c + 32, 64c + 64):
// for c < 2 the low 6 bits of bytes 2c + {0, 1} (scales) and 2c + {4, 5} (minima); else 4 bits in
// the nibbles of byte 2c + {4, 5} and 2 at the top of bytes 2c - {4, 3} and 2c + {0, 1}.
struct PackedScales {
  uchar2 a, b, nibbles;

  // From those of c & 1 on.
  static METAL_FUNC PackedScales load(device const uchar* p) {
    return {load_as<uchar2>(p), load_as<uchar2>(p + 4), load_as<uchar2>(p + 8)};
  }
  // Out of the first 16 bytes of a block: one load, where gemm would wait for each line of the
  // cache that the rows of its lanes touch (M = 512 on an H200: 881 us with four, 697 with one).
  // gemv has no use for it: 0.3 issue cycles a weight to take the bytes apart.
  static METAL_FUNC PackedScales of(uint4 header, uint c) {
    return {two_bytes(header.y, c), two_bytes(header.z, c), two_bytes(header.w, c)};
  }
  static METAL_FUNC uchar2 two_bytes(uint word, uint c) {
    const uchar2 low = as_type<uchar2>(half_word(word, 0));
    const uchar2 high = as_type<uchar2>(half_word(word, 1));
    return (c & 1) != 0 ? high : low;
  }
  // Masks and places depend on c alone, which a lane knows before the loop: 15 operations. In half,
  // where all these integers are exact. The second scale comes divided by high_place.
  static METAL_FUNC void unpack(PackedScales s, uint c, half high_place, thread half2& scale,
                                thread half2& minimum) {
    const bool split = c >= 2;
    const uint low_mask = kExponent10 | (split ? 0x000F000Fu : 0u);
    const uint high_mask = kExponent10 | (split ? 0x00F000F0u : 0u);
    const uint top_mask = kExponent10 | (split ? 0x00C000C0u : 0x003F003Fu);
    const half top_place = split ? 0.25h : 1.0h;
    const half2 place = half2(1.0h, high_place);
    const uint a = open_pair(as_type<uint>(ushort2(s.a)));
    const uint b = open_pair(as_type<uint>(ushort2(s.b)));
    const uint nibbles = open_pair(as_type<uint>(ushort2(s.nibbles)));
    const half scale_bias = -1024.0h * top_place - 1024.0h;
    const half minimum_bias = -1024.0h * top_place - 64.0h;
    scale = fma(as_type<half2>(nibbles & low_mask), place, scale_bias * place);
    scale = fma(as_type<half2>(a & top_mask), top_place * place, scale);
    minimum = fma(as_type<half2>(nibbles & high_mask), half2(1 / 16.0h), half2(minimum_bias));
    minimum = fma(as_type<half2>(b & top_mask), half2(top_place), minimum);
  }
};

// The scales of a lane's piece, of weave c of a block.
struct WeaveScales {
  half2 d;
  PackedScales packed;

  static METAL_FUNC WeaveScales fetch(device const uchar* b, device const uchar* packed) {
    return {load_as<half2>(b), PackedScales::load(packed)};
  }
  // d, -dmin and the factors of both, for codes of the second run that come times 16.
  template <class P>
  static METAL_FUNC void unpack(WeaveScales s, uint c, thread P& p) {
    half2 scale, minimum;
    PackedScales::unpack(s.packed, c, 1 / 16.0h, scale, minimum);
    MM_UNROLL
    for (int i = 0; i < 2; ++i) {
      p.scale[i] = float(scale[i]);
      p.offset[i] = float(minimum[i]);
    }
    p.d = float(s.d.x);
    p.m = -float(s.d.y);
  }
  // code -> (d scale) code - dmin minimum, for values [k, k + 16).
  static METAL_FUNC void apply(device const uchar* b, uint k, thread float (&w)[16]) {
    const uint c = (k & 255) / 64, high = k / 32 & 1;
    const uint4 header = load_as<uint4>(b);
    const half2 d = as_type<half2>(header.x);
    half2 scale, minimum;
    PackedScales::unpack(PackedScales::of(header, c), c, 1.0h, scale, minimum);
    const float s = float(d.x) * float(high ? scale.y : scale.x);
    const float m = -float(d.y) * float(high ? minimum.y : minimum.x);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = fma(s, w[i], m);
  }
};

// The block, its packed scales, and codes from byte `codes` on; of q5_k also the fifth bits.
template <int codes, int parts>
struct LaneOfWeave {
  MM_CONST int kParts = parts;
  static METAL_FUNC uint at(int part, uint piece) {
    if (part == 1) return 4 + 2 * (HalvesOf64::weave(piece) & 1);
    return part == 0 ? 0 : part == 2 ? codes + 16 * piece : 16 + 16 * (piece & 1);
  }
};

// (d scale) code - dmin minimum.
struct Q4_K {
  using Storage = LaneBlocks<256, 144, LaneOfWeave<16, 3>>;
  using Pieces = HalvesOf64;
  using Terms = PieceTerms<2, 2, 1, 0, 1024, 1>;
  using Subnormal = SubnormalTerms<2, 2>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint4 codes;
    WeaveScales scales;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw.codes = load_as<uint4>(Storage::part(c, 2, piece));
    raw.scales = WeaveScales::fetch(Storage::part(c, 0, piece), Storage::part(c, 1, piece));
  }
  // Two bytes at once, as halves: a high nibble in the upper half of the mantissa is 1024 + 16
  // code. The bias, 64 codes, stays until the end of the run, where the sum of x takes it away.
  static METAL_FUNC void two_bytes(uint word, thread float* low, thread float* high) {
    const uint opened = open_pair(word);
    const half2 l = pair<4, 0>(opened) - 1024.0h, h = pair<4, 4>(opened);
    low[0] = float(l.x);
    low[2] = float(l.y);
    high[0] = float(h.x);
    high[2] = float(h.y);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q4_K>& p) {
    MM_UNROLL
    for (int i = 0; i < 16; i += 4) {
      const uint word = raw.codes[i / 4];
      two_bytes(word, p.q + i, p.q + 16 + i);
      two_bytes(word >> 8, p.q + i + 1, p.q + 17 + i);
    }
    WeaveScales::unpack(raw.scales, Pieces::weave(piece), p);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q4_K, Subnormal>& p) {
    subnormals16x2(raw.codes, p.q);
    WeaveScales::unpack(raw.scales, Pieces::weave(piece), p);
    p.d *= kSubnormalUnit;
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    nibbles16(load_as<uint4>(b + 16 + (k & 255) / 64 * 32 + (k & 16)), k & 32, 0, w);
    WeaveScales::apply(b, k, w);
  }
};

// q4_k with a fifth bit: bit 2c of byte l of qh for value 64c + l, 2c + 1 for value 64c + 32 + l.
struct Q5_K {
  using Storage = LaneBlocks<256, 176, LaneOfWeave<48, 4>>;
  using Pieces = HalvesOf64;
  using Terms = PieceTerms<2, 2, 2, 8>;
  using Subnormal = SubnormalTerms<2, 2>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint4 codes, fifth;
    WeaveScales scales;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw.codes = load_as<uint4>(Storage::part(c, 2, piece));
    raw.fifth = load_as<uint4>(Storage::part(c, 3, piece));
    raw.scales = WeaveScales::fetch(Storage::part(c, 0, piece), Storage::part(c, 1, piece));
  }
  // The fifth bits of two bytes, times two powers of two at once, lie above the low nibbles and
  // above the high ones: integers in a float multiply without a shift or a conversion.
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_K>& p) {
    const uint c = Pieces::weave(piece), mask = 0x03030303u << (2 * c);
    const float spread = 9.0f * power_of_two(4 - 2 * int(c)), bias = 8388608.0f * (1.0f - spread);
    MM_UNROLL
    for (int i = 0; i < 16; i += 2) {
      const ushort low_codes = half_word(raw.codes[i / 4] & 0x0F0F0F0Fu, i / 2 % 2);
      const ushort high_codes = half_word(raw.codes[i / 4] & 0xF0F0F0F0u, i / 2 % 2);
      const ushort fifth = half_word(raw.fifth[i / 4] & mask, i / 2 % 2);
      const uint bits = as_type<uint>(fma(as_type<float>(open_word(fifth)), spread, bias));
      const uint low = (bits & (kExponent23 | 0x01010u)) | low_codes;
      const uint high = (bits & (kExponent23 | 0x10100u)) | high_codes;
      const float low_first = as_type<float>(low & (kExponent23 | 0x001Fu));
      const float high_first = as_type<float>(high & (kExponent23 | 0x01F0u));
      p.q[i] = low_first - 8388608.0f;
      p.q[i + 1] = as_type<float>(low) - low_first;
      p.q[16 + i] = high_first - 8388608.0f;
      p.q[17 + i] = as_type<float>(high) - high_first;
    }
    WeaveScales::unpack(raw.scales, c, p);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_K, Subnormal>& p) {
    const uint c = Pieces::weave(piece);
    MM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint word = raw.codes[i], fifth = raw.fifth[i] >> (2 * c) << 4;
      subnormals4<5, 0>((word & 0x0F0F0F0Fu) | (fifth & 0x10101010u), p.q + 4 * i);
      subnormals4<5, 1>((word >> 3 & 0x1E1E1E1Eu) | (fifth & 0x20202020u), p.q + 16 + 4 * i);
    }
    WeaveScales::unpack(raw.scales, c, p);
    p.scale[1] *= 8.0f;
    p.d *= kSubnormalUnit;
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint chunk = (k & 255) / 32;
    nibbles16(load_as<uint4>(b + 48 + chunk / 2 * 32 + (k & 16)), k & 32, 0, w);
    const uint4 qh = load_as<uint4>(b + 16 + (k & 16)) >> chunk;
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] += qh[i / 4] & (1u << i % 4 * 8) ? 16.0f : 0.0f;
    WeaveScales::apply(b, k, w);
  }
};

}  // namespace metalmm
