// GGML blocks of 32 values. Byte j of the codes holds value j (low nibble) and j + 16 (high).
// Two lanes share a block: lane p owns values [8p, 8p + 8) and [16 + 8p, 16 + 8p + 8); in q8_0
// [16p, 16p + 16); in q4_1, a lane owns a block.
// Rejected: four lanes with 8 values each, which read x in longer runs but pay for scale and
// address twice as often: q4_0 1.42 TB/s instead of 2.17 (H200, N = 128256, K = 4096).
#pragma once

#include "blocks.h"
#include "piece.h"

namespace metalmm {

using Pieces32 = PieceLayout<2, 16, 8, 16>;

// The codes of 8 bytes, plus an integer: low nibbles, then high ones.
METAL_FUNC void nibbles8x2(ushort4 halves, float add, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint u = open_word(halves[i]);
    q[2 * i] = field<4, 0>(u, add);
    q[2 * i + 1] = field<4, 8>(u, add);
    q[8 + 2 * i] = field<4, 4>(u, add);
    q[9 + 2 * i] = field<4, 12>(u, add);
  }
}

// nibbles8x2 with a fifth bit: bits [0, 8) and [16, 24) of `fifth`.
template <int i>
METAL_FUNC void five(thread const uint (&u)[4], uint fifth, float add, thread float (&q)[16]) {
  const half2 bits = pair<1, i>(fifth);
  const float bias = add - pair_bias(4, i);
  q[i] = add_pair(bits.x, 4, i, field<4, i % 2 * 8>(u[i / 2], bias));
  q[8 + i] = add_pair(bits.y, 4, i, field<4, i % 2 * 8 + 4>(u[i / 2], bias));
  if constexpr (i < 7) five<i + 1>(u, fifth, add, q);
}
METAL_FUNC void fives8x2(uint2 words, uint fifth, float add, thread float (&q)[16]) {
  const ushort4 halves = as_type<ushort4>(words);
  const uint u[4] = {open_word(halves.x), open_word(halves.y), open_word(halves.z),
                     open_word(halves.w)};
  five<0>(u, open_pair(fifth), add, q);
}

// The codes of 8 bytes as subnormal halves, high nibbles times 16; add_fifth8x2() adds fifth bits.
METAL_FUNC void subnormals8x2(uint2 words, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    subnormals4<4, 0>(words[i], q + 4 * i);
    subnormals4<4, 4>(words[i], q + 8 + 4 * i);
  }
}
template <int i = 0>
METAL_FUNC void add_fifth8x2(uint fifth, thread float (&q)[16]) {
  const half2 bits = subnormals<1, i>(fifth);
  q[i] = fma(float(bits.x), 16.0f / (1 << i), q[i]);
  q[8 + i] = fma(float(bits.y), 256.0f / (1 << i), q[8 + i]);
  if constexpr (i < 7) add_fifth8x2<i + 1>(fifth, q);
}
// The scales of low and high nibbles.
template <class P>
METAL_FUNC void scale_nibbles(half d, thread P& p) {
  p.scale[0] = 1.0f;
  p.scale[1] = 1 / 16.0f;
  p.d = float(d) * kSubnormalUnit;
}

// d * (code - 8).
struct Q4_0 {
  using Storage = LaneBlocks<32, 18, LaneOfCodes<2, 8>>;
  using Pieces = Pieces32;
  using Terms = PieceTerms<1>;
  using Subnormal = SubnormalTerms<2, 0, 8, 0x40>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = true, kHalvesAreExact = true;
  struct Raw {
    ushort4 codes;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw = {load_ushort4(Storage::part(c, 1, piece)), load_as<half>(Storage::part(c, 0, piece))};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q4_0>& p) {
    nibbles8x2(raw.codes, -8, p.q);
    p.d = float(raw.d);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Q4_0, Subnormal>& p) {
    subnormals8x2(as_type<uint2>(raw.codes), p.q);
    scale_nibbles(raw.d, p);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const Window<18> bytes = Window<18>::load<width>(row, k / 32 * 18);
    nibbles16(bytes.four<2>(bytes), k & 16, -8, w);
    scale16(float(bytes.first(bytes)), -0.0f, w);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread half (&w)[16]) {
    const Window<18> bytes = Window<18>::load<width>(row, k / 32 * 18);
    nibbles16(bytes.four<2>(bytes), k & 16, -8.0h, bytes.first(bytes), w);
  }
};

// d * code + m.
struct Q4_1 {
  using Storage = Blocks<32, 20>;
  using Pieces = PieceLayout<1, 32, 16, 16>;
  using Terms = PieceTerms<2, 1, 2, 8>;
  using Subnormal = SubnormalTerms<2, 1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint4 codes;
    half2 d;
  };
  static METAL_FUNC void fetch(Storage::Cursor b, uint, thread Raw& raw) {
    raw = {load_16<4>(b + 4), load_as<half2>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q4_1>& p) {
    nibbles16x2(raw.codes, p.q, p.q + 16);
    p.scale[0] = 1.0f;
    p.scale[1] = 1 / 16.0f;
    p.d = float(raw.d.x);
    p.m = float(raw.d.y);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Q4_1, Subnormal>& p) {
    subnormals16x2(raw.codes, p.q);
    scale_nibbles(raw.d.x, p);
    p.m = float(raw.d.y);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 32);
    nibbles16(load_16<4>(b + 4), k & 16, 0, w);
    scale16(load_half(b), load_half(b + 2), w);
  }
};

// Adds 16 times bit i of `bits` to code i.
METAL_FUNC void add_fifth16(uint bits, thread float (&w)[16]) {
  MM_UNROLL
  for (int i = 0; i < 16; ++i) w[i] += bits & (1u << i) ? 16.0f : 0.0f;
}

// d * (code - 16), five-bit codes: bit j of the word qh is the high bit of value j.
struct Q5_0 {
  using Storage = LaneBlocks<32, 22, LaneOfCodes<6, 8>>;
  using Pieces = Pieces32;
  using Terms = PieceTerms<1>;
  using Subnormal = SubnormalTerms<2, 0, 16, 0x40>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint2 codes;
    uint fifth;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw = {load_8<2>(Storage::part(c, 1, piece)), load_4<2>(Storage::part(c, 0, piece) + 2),
           load_as<half>(Storage::part(c, 0, piece))};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_0>& p) {
    fives8x2(raw.codes, raw.fifth >> (8 * piece), -16, p.q);
    p.d = float(raw.d);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_0, Subnormal>& p) {
    subnormals8x2(raw.codes, p.q);
    add_fifth8x2(raw.fifth >> (8 * piece), p.q);
    scale_nibbles(raw.d, p);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const Window<22> bytes = Window<22>::load<width == 2 ? 2 : 4>(row, k / 32 * 22);
    nibbles16(bytes.four<6>(bytes), k & 16, -16, w);
    add_fifth16(bytes.word<2>(bytes) >> (k & 16), w);
    scale16(float(bytes.first(bytes)), -0.0f, w);
  }
};

// d * code + m, codes as in q5_0.
struct Q5_1 {
  using Storage = LaneBlocks<32, 24, LaneOfCodes<8, 8>>;
  using Pieces = Pieces32;
  using Terms = PieceTerms<1, 1>;
  using Subnormal = SubnormalTerms<2, 1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint2 codes;
    uint fifth;
    half2 d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw = {load_8<8>(Storage::part(c, 1, piece)), load_as<uint>(Storage::part(c, 0, piece) + 4),
           load_as<half2>(Storage::part(c, 0, piece))};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_1>& p) {
    fives8x2(raw.codes, raw.fifth >> (8 * piece), 0, p.q);
    p.d = float(raw.d.x);
    p.m = float(raw.d.y);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q5_1, Subnormal>& p) {
    subnormals8x2(raw.codes, p.q);
    add_fifth8x2(raw.fifth >> (8 * piece), p.q);
    scale_nibbles(raw.d.x, p);
    p.m = float(raw.d.y);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 32);
    nibbles16(load_16<8>(b + 8), k & 16, 0, w);
    add_fifth16(load_as<uint>(b + 4) >> (k & 16), w);
    scale16(load_half(b), load_half(b + 2), w);
  }
};

// d * code, int8 codes. A lane reads its 16 as a window of 18 bytes: four loads instead of
// ten. Loads of 2 bytes fill the L1 of an H200, 87 %, where memory is at 73 %.
struct Q8_0 {
  using Storage = LaneBlocks<32, 34, LaneOfCodes<0, 16>, true>;
  using Pieces = PieceLayout<2, 16, 16, 16>;
  using Terms = PieceTerms<1>;
  using Subnormal = SubnormalTerms<1, 0, 128>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = true, kHalvesAreExact = true;
  MM_CONST uint kSigns = 0x8080;  // flipping a sign bit adds 128

  struct Raw {
    Window<18> bytes;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw.bytes = Window<18>::fetch_part<Storage>(c, 1, piece);
    raw.d = load_as<half>(Storage::part(c, 0, piece));
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q8_0>& p) {
    bytes16<kSigns>(raw.bytes.four<2>(raw.bytes), -128, p.q);
    p.d = float(raw.d);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Q8_0, Subnormal>& p) {
    const uint4 words = raw.bytes.four<2>(raw.bytes);
    MM_UNROLL
    for (int i = 0; i < 4; ++i) subnormals4<8, 0>(words[i] ^ kSigns * 0x00010001u, p.q + 4 * i);
    p.d = float(raw.d) * kSubnormalUnit;
  }
  // The codes of values [k, k + 16), the last bytes of a window of 18 as in q4_0.
  template <int width>
  static METAL_FUNC uint4 codes16(Row row, uint k) {
    const Window<18> bytes = Window<18>::load<width>(row, k / 32 * 34, k & 16);
    return bytes.four<2>(bytes);
  }
  // The read that takes the first codes has the scale, too.
  template <int width>
  static METAL_FUNC half scale_of(Row row, uint k) {
    const Window<2> bytes = Window<2>::load<width>(row, k / 32 * 34);
    return bytes.first(bytes);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const uint4 codes = codes16<width>(row, k);
    bytes16<kSigns>(codes, -128, w);
    scale16(float(scale_of<width>(row, k)), -0.0f, w);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread half (&w)[16]) {
    const uint4 codes = eight_apart(codes16<width>(row, k));
    const half d = scale_of<width>(row, k);
    MM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const half2 even = as_type<half2>((codes[i] & 0x00FF00FFu) ^ 0x64806480u);
      const half2 odd = as_type<half2>((codes[i] >> 8 & 0x00FF00FFu) ^ 0x64806480u);
      scale_two(even - 1152.0h, odd - 1152.0h, d, w + 2 * i);
    }
  }
};

}  // namespace metalmm
