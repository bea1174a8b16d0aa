// Codes of one or two bits and one scale d a block: tq1_0, tq2_0 and q2_0, d (q - 1), and q1_0,
// d and -d.
#pragma once

#include "kquants_2_3_6.h"

namespace metalmm {

// Digits of base 3, five in a byte. Values [32 n, 32 n + 32), n < 5, are digits n of bytes
// [0, 32); values [160 + 16 n, + 16) digits n of bytes [32, 48); values [240 + 4 n, + 4), n < 4,
// digits n of bytes [48, 52). A lane owns 32 values.
struct TQ1_0 {
  using Pieces = PieceLayout<8, 32, 32, 32>;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  // Word i of the 16 values h of a block: where it is, and 3^n.
  static METAL_FUNC uint place(uint h, uint i) {
    return h < 10 ? 16 * (h & 1) + 4 * i : h < 15 ? 32 + 4 * i : 48;
  }
  // The block, and the words of a piece: the four of an even h follow each other.
  struct Lane {
    MM_CONST int kParts = 6;
    static METAL_FUNC uint at(int part, uint piece) {
      return part == 0 ? 0 : part == 1 ? place(2 * piece, 0) : place(2 * piece + 1, part - 2);
    }
  };
  using Storage = LaneBlocks<256, 54, Lane>;
  struct Raw {
    uint words[8];
    half d;
  };
  static METAL_FUNC uint power(uint h, uint i) {
    const uint n = h < 10 ? h / 2 : h < 15 ? h - 10 : i;
    return n < 4 ? 0x1B090301u >> 8 * n & 255 : 81;  // a chain of choices becomes a table in memory
  }
  // Digit n of a byte is the integer part of 3 / 256 times the low byte of 3^n times the byte: two
  // bytes side by side, 16 bits for each.
  static METAL_FUNC half2 digits(uint bytes, uint power) {
    const uint low = (bytes & 0x00FF00FFu) * power & 0x00FF00FFu;
    return fma(pair<2, 8>(open_pair(low * 3 & 0x03000300u)), half2(1 / 256.0h), half2(-5.0h));
  }
  static METAL_FUNC void four(uint word, uint power, thread float* q) {
    const half2 even = digits(word, power), odd = digits(word >> 8, power);
    q[0] = float(even.x);
    q[1] = float(odd.x);
    q[2] = float(even.y);
    q[3] = float(odd.y);
  }
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    MM_UNROLL
    for (int i = 0; i < 4; ++i) {
      raw.words[i] = load_4<2>(Storage::part(c, 1, piece) + 4 * i);
      raw.words[4 + i] = load_4<2>(Storage::part(c, 2 + i, piece));
    }
    raw.d = load_as<half>(Storage::part(c, 0, piece) + 52);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<TQ1_0>& p) {
    MM_UNROLL
    for (int i = 0; i < 8; ++i) {
      four(raw.words[i], power(2 * piece + i / 4, i % 4), p.q + 4 * i);
    }
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint h = (k & 255) / 16;
    MM_UNROLL
    for (int i = 0; i < 4; ++i) four(load_4<2>(b + place(h, i)), power(h, i), w + 4 * i);
    scale16(load_half(b + 52), -0.0f, w);
  }
};

// Two bits a code, from byte 0, as in q2_k.
struct TQ2_0 {
  using Storage = Blocks<256, 66>;
  using Pieces = QuartersOf128;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    ushort4 codes;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor b, uint piece, thread Raw& raw) {
    raw = {load_ushort4(b + kOwnBytes * piece), load_as<half>(b + 64)};
  }
  // Fields of two bytes: t of run t.
  template <int t>
  static METAL_FUNC void crumbs(uint opened, thread float* q) {
    q[kOwnBytes * t] = field<2, 2 * t>(opened, -1);
    q[kOwnBytes * t + 1] = field<2, 2 * t + 8>(opened, -1);
    if constexpr (t < 3) crumbs<t + 1>(opened, q);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<TQ2_0>& p) {
    MM_UNROLL
    for (int i = 0; i < 4; ++i) crumbs<0>(open_word(raw.codes[i]), p.q + 2 * i);
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint group = (k & 255) / 16;
    crumbs16(load_16<2>(b + group / 8 * 32 + (k & 16)), group / 2 & 3, w);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] -= 1.0f;
    scale16(load_half(b + 64), -0.0f, w);
  }
};

// Bit i of the codes is the sign of value i: 1, +d; 0, -d. A lane owns 32 values.
struct Q1_0 {
  using Storage = Blocks<128, 18>;
  using Pieces = PieceLayout<4, 32, 32, 32>;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint codes;
    half d;
  };
  // 2 bit - 1, of bits i on of a word that was opened one bit higher: twice 2^23 and 1 is no float.
  template <int i = 0>
  static METAL_FUNC void signs(uint opened, thread float* q) {
    constexpr float kPlace = 1.0f / (1 << i);
    q[i] = fma(as_type<float>(opened & (kExponent23 | 2u << i)), kPlace, -1 - 8388608.0f * kPlace);
    if constexpr (i < 15) signs<i + 1>(opened, q);
  }
  static METAL_FUNC void fetch(Storage::Cursor b, uint piece, thread Raw& raw) {
    raw = {load_4<2>(b + 2 + 4 * piece), load_as<half>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q1_0>& p) {
    MM_UNROLL
    for (int i = 0; i < 2; ++i) signs(open_word(uint(half_word(raw.codes, i)) << 1), p.q + 16 * i);
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 128);
    signs(open_word(uint(load_as<ushort>(b + 2 + (k & 127) / 8)) << 1), w);
    scale16(load_half(b), -0.0f, w);
  }
};

// Two bits a code, in the order of the values. A lane owns 32 values.
struct Q2_0 {
  using Storage = Blocks<64, 18>;
  using Pieces = PieceLayout<2, 32, 32, 32>;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    ushort4 codes;
    half d;
  };
  template <int i = 0>
  static METAL_FUNC void crumbs(uint opened, thread float* q) {
    q[i] = field<2, 2 * i>(opened, -1);
    if constexpr (i < 7) crumbs<i + 1>(opened, q);
  }
  static METAL_FUNC void fetch(Storage::Cursor b, uint piece, thread Raw& raw) {
    raw = {load_ushort4(b + 2 + 8 * piece), load_as<half>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q2_0>& p) {
    MM_UNROLL
    for (int i = 0; i < 4; ++i) crumbs(open_word(raw.codes[i]), p.q + 8 * i);
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 64);
    const uint codes = load_4<2>(b + 2 + (k & 63) / 4);
    MM_UNROLL
    for (int i = 0; i < 2; ++i) crumbs(open_word(half_word(codes, i)), w + 8 * i);
    scale16(load_half(b), -0.0f, w);
  }
};

}  // namespace metalmm
