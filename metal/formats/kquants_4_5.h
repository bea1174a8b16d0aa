// q4_k and q5_k: super-blocks of 256 values, 6-bit scales and minima per 32.
// Bytes [32c, 32c + 32) of the codes hold values [64c, 64c + 32) (low nibbles) and the next 32
// (high). Eight lanes share a super-block: lane p owns the 16 bytes from 32c + 16t, c = p / 2, t =
// p % 2.
#pragma once

#include "format.h"

namespace metalmm {

// Scales and minima of values [64c, 64c + 32) and [64c + 32, 64c + 64), from the 12 packed bytes.
// Two bytes of each of the three words hold the four numbers: for c < 2 the low 6 bits of a and b;
// else 4 bits in a nibble of the third word and 2 at the top of a and b.
METAL_FUNC void scales_6bit(device const uchar* packed, uint c, thread float (&scale)[2],
                            thread float (&minimum)[2]) {
  device const uchar* p = packed + 2 * (c & 1);
  const uint ab = as_type<uint>(ushort2(load_as<ushort>(p), load_as<ushort>(p + 4)));
  const ushort third = load_as<ushort>(p + 8);
  const uint nibble = as_type<uint>(ushort2(third, third >> 4)) & 0x0F0F0F0Fu;
  const uint six = c < 2 ? ab & 0x3F3F3F3Fu : nibble | ((ab & 0xC0C0C0C0u) >> 2);
  const half2 even = pair<6, 0>(open_pair(six)), odd = pair<6, 0>(open_pair(six >> 8));
  scale[0] = float(even.x) - 1024.0f;
  scale[1] = float(odd.x) - 1024.0f;
  minimum[0] = float(even.y) - 1024.0f;
  minimum[1] = float(odd.y) - 1024.0f;
}

template <int bytes>
struct KBlock : BlockFormat<256, bytes> {
  MM_CONST int kLanes = 8, kValues = 32, kRun = 16, kRunStride = 32, kSegments = 2;
  MM_CONST bool kHasOffset = true;
  static METAL_FUNC uint first(uint piece) { return 64 * (piece / 2) + 16 * (piece & 1); }

  // d, -dmin and the factors of both.
  template <class P>
  static METAL_FUNC void load_scales(device const uchar* b, uint piece, thread P& p) {
    const half2 d = load_as<half2>(b);
    p.d = float(d.x);
    p.m = -float(d.y);
    scales_6bit(b + 4, piece / 2, p.scale, p.offset);
  }
  // code -> (d scale) code - dmin minimum, for values [k, k + 16).
  static METAL_FUNC void apply_scales(device const uchar* b, uint k, thread float (&w)[16]) {
    float scale[2], minimum[2];
    scales_6bit(b + 4, (k & 255) / 64, scale, minimum);
    const half2 d = load_as<half2>(b);
    const bool high = k & 32;
    const float s = float(d.x) * (high ? scale[1] : scale[0]);
    const float m = -float(d.y) * (high ? minimum[1] : minimum[0]);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = fma(s, w[i], m);
  }
};

// The 32 codes of 16 bytes, plus integers: low nibbles, then high ones.
METAL_FUNC void nibbles16x2(uint4 words, float add_low, float add_high, thread float (&q)[32]) {
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const ushort2 halves = as_type<ushort2>(words[i]);
    MM_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint u = open_word(halves[j]);
      const int at = 4 * i + 2 * j;
      q[at] = field<4, 0>(u, add_low);
      q[at + 1] = field<4, 8>(u, add_low);
      q[16 + at] = field<4, 4>(u, add_high);
      q[17 + at] = field<4, 12>(u, add_high);
    }
  }
}

// (d scale) code - dmin minimum.
// 1.5 bitwise, 0.09 shift, 2.35 fma, 0.16 load: 4.3 cycles.
struct Q4_K : KBlock<144> {
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q4_K>& p) {
    device const uchar* b = block(row, unit);
    load_scales(b, piece, p);
    nibbles16x2(load_as<uint4>(b + 16 + 16 * piece), 0, 0, p.q);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    nibbles16(load_as<uint4>(b + 16 + (k & 255) / 64 * 32 + (k & 16)), k & 32, 0, w);
    apply_scales(b, k, w);
  }
};

// As q4_k, with a fifth bit: bit 2c of byte l of qh for value 64c + l, 2c + 1 for value 64c + 32 +
// l.
// 2.3 bitwise, 0.34 shift, 3.35 fma, 0.19 load: 7.0 cycles.
struct Q5_K : KBlock<176> {
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q5_K>& p) {
    device const uchar* b = block(row, unit);
    load_scales(b, piece, p);
    nibbles16x2(load_as<uint4>(b + 48 + 16 * piece), -pair_bias(4, 0), -pair_bias(4, 1), p.q);
    const uint4 qh = load_as<uint4>(b + 16 + 16 * (piece & 1)) >> (piece & 6);
    MM_UNROLL
    for (int i = 0; i < 8; ++i) {  // two bytes at a time: even ones, then odd ones of a word
      const uint opened = open_pair(qh[i / 2] >> (i % 2 * 8));
      const half2 low = pair<1, 0>(opened), high = pair<1, 1>(opened);
      const int at = i / 2 * 4 + i % 2;
      p.q[at] = add_pair(low.x, 4, 0, p.q[at]);
      p.q[at + 2] = add_pair(low.y, 4, 0, p.q[at + 2]);
      p.q[at + 16] = add_pair(high.x, 4, 1, p.q[at + 16]);
      p.q[at + 18] = add_pair(high.y, 4, 1, p.q[at + 18]);
    }
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    const uint chunk = (k & 255) / 32;
    nibbles16(load_as<uint4>(b + 48 + chunk / 2 * 32 + (k & 16)), k & 32, 0, w);
    const uint4 qh = load_as<uint4>(b + 16 + (k & 16)) >> chunk;
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] += qh[i / 4] & (1u << i % 4 * 8) ? 16.0f : 0.0f;
    apply_scales(b, k, w);
  }
};

}  // namespace metalmm
