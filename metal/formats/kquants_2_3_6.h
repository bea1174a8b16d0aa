// q2_k, q3_k and q6_k: super-blocks of 256 values, a scale per 16.
// Value 128n + 32t + l: bits [2t, 2t + 2) of byte 32n + l hold two bits of its code.
// Eight lanes share a super-block: lane p owns the bytes [l, l + 8) of half n, n = p / 4,
// l = 8 (p % 4), and of its scales those of 16-value group 8n + 2t + g, g = l / 16, t = 0 ... 3.
#pragma once

#include "format.h"

namespace metalmm {

template <int bytes>
struct KBlock16 : BlockFormat<256, bytes> {
  MM_CONST int kLanes = 8, kValues = 32, kRun = 8, kRunStride = 32, kSegments = 4;
  static METAL_FUNC uint first(uint piece) { return 128 * (piece / 4) + 8 * (piece & 3); }
};

// Two-bit fields of 8 bytes: run t in q[8t, 8t + 8), plus add[t].
template <int t>
METAL_FUNC void crumbs2x4(uint opened, int at, float4 add, thread float (&q)[32]) {
  q[8 * t + at] = field<2, 2 * t>(opened, add[t]);
  q[8 * t + at + 1] = field<2, 2 * t + 8>(opened, add[t]);
  if constexpr (t < 3) crumbs2x4<t + 1>(opened, at, add, q);
}
METAL_FUNC void crumbs8x4(uint2 words, float4 add, thread float (&q)[32]) {
  const ushort4 halves = as_type<ushort4>(words);
  MM_UNROLL
  for (int i = 0; i < 4; ++i) crumbs2x4<0>(open_word(halves[i]), 2 * i, add, q);
}

// Adds 2^to times field t of 8 bytes, of `bits` bits each, to run t.
template <int bits, int to, int t>
METAL_FUNC void add_high2x4(uint opened, int at, thread float (&q)[32]) {
  const half2 high = pair<bits, bits * t>(opened);
  q[8 * t + at] = add_pair(high.x, to, bits * t, q[8 * t + at]);
  q[8 * t + at + 2] = add_pair(high.y, to, bits * t, q[8 * t + at + 2]);
  if constexpr (t < 3) add_high2x4<bits, to, t + 1>(opened, at, q);
}
template <int bits, int to>
METAL_FUNC void add_high8x4(uint2 words, thread float (&q)[32]) {
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    add_high2x4<bits, to, 0>(open_pair(words[i]), 4 * i, q);
    add_high2x4<bits, to, 0>(open_pair(words[i] >> 8), 4 * i + 1, q);
  }
}

// Two-bit fields t of 16 bytes, plus an integer.
METAL_FUNC void crumbs16(uint4 words, uint t, float add, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint u = open_word(as_type<ushort2>(words[i / 2])[i % 2] >> (2 * t));
    q[2 * i] = field<2, 0>(u, add);
    q[2 * i + 1] = field<2, 8>(u, add);
  }
}

// (d scale) code - dmin minimum: 4-bit scale (low) and minimum (high) in a byte per group.
// 1.4 bitwise, 0.06 shift, 2.6 fma, 0.16 load: 4.3 cycles.
struct Q2_K : KBlock16<84> {
  MM_CONST bool kHasOffset = true;
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q2_K>& p) {
    device const uchar* b = block(row, unit);
    crumbs8x4(load_8<4>(b + 16 + 8 * piece), float4(0), p.q);
    const uint2 scales = load_8<4>(b + 8 * (piece / 4)) >> (8 * (piece / 2 & 1));
    MM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint opened = open_pair(scales[i]);
      const half2 scale = pair<4, 0>(opened), minimum = pair<4, 4>(opened);
      MM_UNROLL
      for (int j = 0; j < 2; ++j) {
        p.scale[2 * i + j] = float(scale[j]) - 1024.0f;
        p.offset[2 * i + j] = fma(float(minimum[j]), 1 / 16.0f, -64.0f);
      }
    }
    const half2 d = load_as<half2>(b + 80);
    p.d = float(d.x);
    p.m = -float(d.y);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    const uint group = (k & 255) / 16;
    crumbs16(load_16<4>(b + 16 + group / 8 * 32 + (k & 16)), group / 2 & 3, 0, w);
    const float d = load_half(b + 80) * float(b[group] & 15);
    const float m = load_half(b + 82) * float(b[group] >> 4);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = fma(d, w[i], -m);
  }
};

// (d (scale - 32)) (code - 4): bit 4n + t of byte l of hmask is the third bit of the code.
// Scales of 6 bits: nibble n of byte 2t + g, and bits [4n + 2 (t / 2), + 2) of byte 8 + 2 (t % 2) +
// g.
// 2.1 bitwise, 0.28 shift, 3.3 fma, 0.47 load: 6.5 cycles.
struct Q3_K : KBlock16<110> {
  MM_CONST bool kHasOffset = false;
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q3_K>& p) {
    device const uchar* b = block(row, unit);
    const uint n = piece / 4, shift = 4 * n + 8 * (piece / 2 & 1);
    const float4 bias =
        -4.0f - float4(pair_bias(2, 0), pair_bias(2, 1), pair_bias(2, 2), pair_bias(2, 3));
    crumbs8x4(load_8<2>(b + 32 + 8 * piece), bias, p.q);
    add_high8x4<1, 2>(load_8<2>(b + 8 * (piece & 3)) >> (4 * n), p.q);
    const uint2 low = load_8<2>(b + 96) >> shift;
    const uint top = load_4<2>(b + 104) >> shift;
    const uint2 six = (low & 0x000F000Fu) | (uint2(top << 4, top << 2) & 0x00300030u);
    MM_UNROLL
    for (int t = 0; t < 4; ++t) {
      p.scale[t] = float(pair<6, 0>(open_pair(six[t / 2]))[t % 2]) - 1056.0f;
    }
    p.d = load_half(b + 108);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    const uint j = (k & 255) / 16;
    crumbs16(load_16<2>(b + 32 + j / 8 * 32 + (k & 16)), j / 2 & 3, -4, w);
    const uint4 high = load_16<2>(b + (k & 16)) >> (j / 2);
    const uint low = b[96 + (j & 7)] >> (j / 8 * 4) & 15;
    const uint top = b[104 + (j & 3)] >> (j / 4 * 2) & 3;
    const float d = load_half(b + 108) * (float(low | top << 4) - 32.0f);
    MM_UNROLL
    for (int i = 0; i < 16; ++i)
      w[i] = d * (w[i] + (high[i / 4] & (1u << i % 4 * 8) ? 4.0f : 0.0f));
  }
};

// (d scale) (code - 32): nibbles of value 128n + 32t + l in byte 64n + 32 (t % 2) + l, high for t
// >= 2; the upper two bits of the code as above, from byte 128; int8 scales from byte 192.
// 2.1 bitwise, 0.06 shift, 3.3 fma, 0.53 load: 5.7 cycles.
struct Q6_K : KBlock16<210> {
  MM_CONST bool kHasOffset = false;
  static METAL_FUNC void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q6_K>& p) {
    device const uchar* b = block(row, unit);
    const uint n = piece / 4, l = 8 * (piece & 3);
    MM_UNROLL
    for (int s = 0; s < 2; ++s) {  // low nibbles are run s, high nibbles run s + 2
      const ushort4 halves = as_type<ushort4>(load_8<2>(b + 64 * n + 32 * s + l));
      const float add_low = -32 - pair_bias(4, 2 * s), add_high = -32 - pair_bias(4, 2 * s + 4);
      MM_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint u = open_word(halves[i]);
        const int at = 8 * s + 2 * i;
        p.q[at] = field<4, 0>(u, add_low);
        p.q[at + 1] = field<4, 8>(u, add_low);
        p.q[at + 16] = field<4, 4>(u, add_high);
        p.q[at + 17] = field<4, 12>(u, add_high);
      }
    }
    add_high8x4<2, 4>(load_8<2>(b + 128 + 8 * piece), p.q);
    MM_UNROLL
    for (int t = 0; t < 4; ++t) {  // int8: flipping the sign bit adds 128
      const ushort byte = b[192 + 8 * n + l / 16 + 2 * t];
      p.scale[t] = float(as_type<half>(ushort(byte ^ 0x6480))) - 1152.0f;
    }
    p.d = load_half(b + 208);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 256);
    const uint j = (k & 255) / 16, t = j / 2 & 3;
    float high[16];
    crumbs16(load_16<2>(b + 128 + j / 8 * 32 + (k & 16)), t, -2, high);
    nibbles16(load_16<2>(b + j / 8 * 64 + (t & 1) * 32 + (k & 16)), t & 2, 0, w);
    const float d = load_half(b + 208) * float(as_type<char>(b[192 + j]));
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = d * fma(high[i], 16.0f, w[i]);
  }
};

}  // namespace metalmm
