// q2_k, q3_k and q6_k: blocks of 256 values, a scale per 16.
// Value 128n + 32t + l: bits [2t, 2t + 2) of byte 32n + l hold two bits of its code.
// A lane owns 8 of these bytes: lane p those from 32n + l = 8 p, and of the scales those of
// the groups 8n + 2t + g of 16 values, g = l / 16, t = 0 ... 3.
#pragma once

#include "blocks.h"
#include "piece.h"

namespace metalmm {

MM_CONST int kOwnBytes = 8;
using QuartersOf128 = PieceLayout<64 / kOwnBytes, 4 * kOwnBytes, kOwnBytes, 32>;

// Two bytes as halves, exponent set.
METAL_FUNC uint open_bytes(uchar a, uchar b) { return open_pair(as_type<uint>(ushort2(a, b))); }

// Two-bit fields t of 16 bytes.
METAL_FUNC void crumbs16(uint4 words, uint t, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint u = open_word(as_type<ushort2>(words[i / 2])[i % 2] >> (2 * t));
    q[2 * i] = field<2, 0>(u);
    q[2 * i + 1] = field<2, 8>(u);
  }
}

// (d scale) code - dmin minimum: 4-bit scale (low) and minimum (high) in a byte per group.
struct Q2_K {
  struct Lane {
    MM_CONST int kParts = 3;
    static METAL_FUNC uint at(int part, uint piece) {
      if (part == 1) return 8 * QuartersOf128::weave(piece) + QuartersOf128::offset(piece) / 16;
      return part == 0 ? 0 : 16 + kOwnBytes * piece;
    }
  };
  using Storage = LaneBlocks<256, 84, Lane>;
  using Pieces = QuartersOf128;
  using Terms = PieceTerms<4, 4, 1, 0, kCrumbBias, 1>;
  using Subnormal = SubnormalTerms<4, 4>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    uint codes[kOwnBytes / 4];
    uchar scales[4];
    half2 d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    MM_UNROLL
    for (int i = 0; i < kOwnBytes / 4; ++i)
      raw.codes[i] = load_as<uint>(Storage::part(c, 2, piece) + 4 * i);
    MM_UNROLL
    for (int t = 0; t < 4; ++t) raw.scales[t] = Storage::part(c, 1, piece)[2 * t];
    raw.d = load_as<half2>(Storage::part(c, 0, piece) + 80);
  }
  // A code of each run, times 4^t, all but the first with kCrumbBias.
  static METAL_FUNC void byte_of_crumbs(uint on_top, thread float* q) {
    q[0] = crumb_on_top<0>(on_top) - float(kCrumbBias);
    q[kOwnBytes] = crumb_on_top<1>(on_top);
    q[2 * kOwnBytes] = crumb_on_top<2>(on_top);
    q[3 * kOwnBytes] = crumb_on_top<3>(on_top);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q2_K>& p) {
    MM_UNROLL
    for (int i = 0; i < kOwnBytes; i += 2) {
      const uint opened = open_word(half_word(raw.codes[i / 4], i / 2 % 2));
      byte_of_crumbs(low_byte_on_top(opened), p.q + i);
      byte_of_crumbs(high_byte_on_top(opened), p.q + i + 1);
    }
    unpack_scales(raw, p);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Q2_K, Subnormal>& p) {
    MM_UNROLL
    for (int i = 0; i < kOwnBytes; i += 4) crumbs_of_word<0>(raw.codes[i / 4], p.q + i);
    unpack_scales(raw, p);
    p.d *= kSubnormalUnit;
  }
  // A run for each field of the bytes, times 4^t.
  template <int t>
  static METAL_FUNC void crumbs_of_word(uint word, thread float* q) {
    subnormals4<2, 2 * t>(word, q + kOwnBytes * t);
    if constexpr (t < 3) crumbs_of_word<t + 1>(word, q);
  }
  template <class P>
  static METAL_FUNC void unpack_scales(thread const Raw& raw, thread P& p) {
    MM_UNROLL
    for (int t = 0; t < 4; t += 2) {  // minima times 16
      const half2 place = t == 0 ? half2(1.0h, 1 / 4.0h) : half2(1 / 16.0h, 1 / 64.0h);
      const uint both = open_bytes(raw.scales[t], raw.scales[t + 1]);
      const half2 low = pair<4, 0>(both), minimum = pair<4, 4>(both) - 1024.0h;
      const half2 scale = fma(low, place, -1024.0h * place);
      MM_UNROLL
      for (int i = 0; i < 2; ++i) {
        p.scale[t + i] = float(scale[i]);
        p.offset[t + i] = float(minimum[i]);
      }
    }
    p.d = float(raw.d.x);
    p.m = float(raw.d.y) * (-1 / 16.0f);
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint group = (k & 255) / 16;
    crumbs16(load_16<4>(b + 16 + group / 8 * 32 + (k & 16)), group / 2 & 3, w);
    const float d = load_half(b + 80) * float(b[group] & 15);
    const float m = load_half(b + 82) * float(b[group] >> 4);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = fma(d, w[i], -m);
  }
};

// (d (scale - 32)) (code - 4): bit 4n + t of byte l of hmask is the third bit of the code.
// Scales of 6 bits: nibble n of byte 2t + g, and bits [4n + 2 (t / 2), + 2) of byte 8 + 2 (t % 2) +
// g.
struct Q3_K {
  struct Lane {
    MM_CONST int kParts = 4;
    static METAL_FUNC uint at(int part, uint piece) {
      if (part == 1) return 96 + QuartersOf128::offset(piece) / 16;
      return part == 0 ? 0 : part == 2 ? 32 + kOwnBytes * piece : QuartersOf128::offset(piece);
    }
  };
  using Storage = LaneBlocks<256, 110, Lane, true>;
  using Pieces = QuartersOf128;
  using Terms = PieceTerms<4>;
  using Subnormal = SubnormalTerms<4, 0, 4, 0x4400>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    Window<kOwnBytes> codes, high;
    uchar low[4], top[2];
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    raw.codes = Window<kOwnBytes>::fetch_part<Storage>(c, 2, piece);
    raw.high = Window<kOwnBytes>::fetch_part<Storage>(c, 3, piece);
    MM_UNROLL
    for (int t = 0; t < 4; ++t) raw.low[t] = Storage::part(c, 1, piece)[2 * t];
    MM_UNROLL
    for (int t = 0; t < 2; ++t) raw.top[t] = Storage::part(c, 1, piece)[8 + 2 * t];
    raw.d = load_as<half>(Storage::part(c, 0, piece) + 108);
  }
  // Third bits of runs t and t + 2, in two bytes: times two powers of two at once, they lie above
  // the other two bits of their codes.
  static METAL_FUNC void unpack_codes(thread const Raw& raw, uint n, thread float* q) {
    const float place = power_of_two(-4 * int(n)), spread0 = 20.0f * place, spread1 = 40.0f * place;
    const float bias0 = 8388608.0f * (1.0f - spread0), bias1 = 8388608.0f * (1.0f - spread1);
    const uint mask0 = 0x05050505u << (4 * n), mask1 = 0x0A0A0A0Au << (4 * n);
    uint codes[kOwnBytes / 4], high[kOwnBytes / 4];
    raw.codes.all(raw.codes, codes);
    raw.high.all(raw.high, high);
    MM_UNROLL
    for (int i = 0; i < kOwnBytes; i += 2) {
      const ushort even_codes = half_word(codes[i / 4] & 0x33333333u, i / 2 % 2);
      const ushort odd_codes = half_word(codes[i / 4] & 0xCCCCCCCCu, i / 2 % 2);
      const uint opened0 = open_word(half_word(high[i / 4] & mask0, i / 2 % 2));
      const uint opened1 = open_word(half_word(high[i / 4] & mask1, i / 2 % 2));
      const uint high0 = as_type<uint>(fma(as_type<float>(opened0), spread0, bias0));
      const uint high1 = as_type<uint>(fma(as_type<float>(opened1), spread1, bias1));
      const uint even = (high0 & (kExponent23 | 0x04444u)) | even_codes;
      const uint odd = (high1 & (kExponent23 | 0x11110u)) | odd_codes;
      q[i] = field<3, 0>(even, -4);
      q[2 * kOwnBytes + i] = field<3, 4>(even, -4);
      q[i + 1] = field<3, 8>(even, -4);
      q[2 * kOwnBytes + i + 1] = field<3, 12>(even, -4);
      q[kOwnBytes + i] = field<3, 2>(odd, -4);
      q[3 * kOwnBytes + i] = field<3, 6>(odd, -4);
      q[kOwnBytes + i + 1] = field<3, 10>(odd, -4);
      q[3 * kOwnBytes + i + 1] = field<3, 14>(odd, -4);
    }
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q3_K>& p) {
    const uint n = Pieces::weave(piece);
    unpack_codes(raw, n, p.q);
    unpack_scales(raw, n, p);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, Codebook,
                                thread Piece<Q3_K, Subnormal>& p) {
    const uint n = Pieces::weave(piece);
    uint codes[kOwnBytes / 4], high[kOwnBytes / 4];
    raw.codes.all(raw.codes, codes);
    raw.high.all(raw.high, high);
    MM_UNROLL
    for (int i = 0; i < kOwnBytes / 4; ++i) {
      MM_UNROLL
      for (int t = 0; t < 2; ++t) {  // with run t + 2, times 16
        const uint third = (high[i] >> (4 * n + t) & 0x05050505u) * 20 & 0x44444444u;
        const uint word = (codes[i] >> 2 * t & 0x33333333u) | third;
        subnormals4<3, 0>(word, p.q + kOwnBytes * t + 4 * i);
        subnormals4<3, 4>(word, p.q + kOwnBytes * (t + 2) + 4 * i);
      }
    }
    unpack_scales(raw, n, p);
    p.scale[2] /= 16;
    p.scale[3] /= 16;
    p.d *= kSubnormalUnit;
  }
  template <class P>
  static METAL_FUNC void unpack_scales(thread const Raw& raw, uint n, thread P& p) {
    const uint low_mask = kExponent10 | 0x000F000Fu << (4 * n);
    const uint tops = open_bytes(raw.top[0], raw.top[1]);
    const half low_place = n == 0 ? 1.0h : 1 / 16.0h;
    MM_UNROLL
    for (int t = 0; t < 4; t += 2) {
      const half top_place = (t == 0 ? 16.0h : 4.0h) * low_place;
      const uint top_mask = kExponent10 | 0x00030003u << (4 * n + t);
      const half2 top = as_type<half2>(tops & top_mask);
      const half2 low = as_type<half2>(open_bytes(raw.low[t], raw.low[t + 1]) & low_mask);
      const half bias = -1024.0h * top_place - 1024.0h * low_place - 32.0h;
      const half2 scale = fma(low, half2(low_place), fma(top, half2(top_place), half2(bias)));
      p.scale[t] = float(scale.x);
      p.scale[t + 1] = float(scale.y);
    }
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint j = (k & 255) / 16;
    const uint at = k / 256 * Storage::kBlockBytes;
    const uint4 crumbs =
        load_inner16<width>(row, at, 32 + j / 8 * 32 + (k & 16)) >> (j / 2 & 3) * 2;
    const uint4 high = load_inner16<width>(row, at, k & 16) >> (j / 2);
    bytes16((crumbs & 0x03030303u) | (high & 0x01010101u) << 2, -4, w);
    const uint low = b[96 + (j & 7)] >> (j / 8 * 4) & 15;
    const uint top = b[104 + (j & 3)] >> (j / 4 * 2) & 3;
    const float d = load_half(b + 108) * (float(low | top << 4) - 32.0f);
    scale16(d, -0.0f, w);
  }
};

// (d scale) (code - 32): nibbles of value 128n + 32t + l in byte 64n + 32 (t % 2) + l, high for t
// >= 2; the upper two bits of the code as above, from byte 128; int8 scales from byte 192.
struct Q6_K {
  struct Lane {
    MM_CONST int kParts = 5;
    static METAL_FUNC uint at(int part, uint piece) {
      const uint n = QuartersOf128::weave(piece), l = QuartersOf128::offset(piece);
      if (part == 1) return 192 + 8 * n + l / 16;
      return part == 0 ? 0 : part == 4 ? 128 + kOwnBytes * piece : 64 * n + l + 32 * (part - 2);
    }
  };
  using Storage = LaneBlocks<256, 210, Lane, true>;
  using Pieces = QuartersOf128;
  using Terms = PieceTerms<4>;
  using Subnormal = SubnormalTerms<4, 0, 32>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;
  struct Raw {
    Window<kOwnBytes> low[2], high;
    uchar scales[4];
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint piece, thread Raw& raw) {
    MM_UNROLL
    for (int s = 0; s < 2; ++s)
      raw.low[s] = Window<kOwnBytes>::fetch_part<Storage>(c, 2 + s, piece);
    raw.high = Window<kOwnBytes>::fetch_part<Storage>(c, 4, piece);
    MM_UNROLL
    for (int t = 0; t < 4; ++t) raw.scales[t] = Storage::part(c, 1, piece)[2 * t];
    raw.d = load_as<half>(Storage::part(c, 0, piece) + 208);
  }
  // Low nibbles are runs 0 and 1, high ones runs 2 and 3. The upper bits of runs 0 and 2, times 16,
  // lie above them, and those of runs 1 and 3 times 4.
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Q6_K>& p) {
    uint codes[2][kOwnBytes / 4], upper[kOwnBytes / 4];
    raw.low[0].all(raw.low[0], codes[0]);
    raw.low[1].all(raw.low[1], codes[1]);
    raw.high.all(raw.high, upper);
    MM_UNROLL
    for (int i = 0; i < kOwnBytes; i += 2) {
      const float high = as_type<float>(open_word(half_word(upper[i / 4], i / 2 % 2)));
      MM_UNROLL
      for (int s = 0; s < 2; ++s) {
        const float spread = s == 0 ? 16.0f : 4.0f;
        const uint bits = as_type<uint>(fma(high, spread, 8388608.0f * (1.0f - spread)));
        const ushort low_codes = half_word(codes[s][i / 4] & 0x0F0F0F0Fu, i / 2 % 2);
        const ushort high_codes = half_word(codes[s][i / 4] & 0xF0F0F0F0u, i / 2 % 2);
        const uint low = (bits & (kExponent23 | 0x03030u)) | low_codes;
        const uint top = (bits & (kExponent23 | 0x30300u)) | high_codes;
        const int at = kOwnBytes * s + i;
        p.q[at] = field<6, 0>(low, -32);
        p.q[at + 1] = field<6, 8>(low, -32);
        p.q[2 * kOwnBytes + at] = field<6, 4>(top, -32);
        p.q[2 * kOwnBytes + at + 1] = field<6, 12>(top, -32);
      }
    }
    unpack_scales(raw, p);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Q6_K, Subnormal>& p) {
    uint codes[2][kOwnBytes / 4], upper[kOwnBytes / 4];
    raw.low[0].all(raw.low[0], codes[0]);
    raw.low[1].all(raw.low[1], codes[1]);
    raw.high.all(raw.high, upper);
    MM_UNROLL
    for (int i = 0; i < kOwnBytes / 4; ++i) {
      MM_UNROLL
      for (int t = 0; t < 4; ++t) {
        const uint low = codes[t % 2][i] >> t / 2 * 4,
                   high = t < 3 ? upper[i] << (4 - 2 * t) : upper[i] >> 2;
        subnormals4<6, 0>((low & 0x0F0F0F0Fu) | (high & 0x30303030u), p.q + kOwnBytes * t + 4 * i);
      }
    }
    unpack_scales(raw, p);
    p.d *= kSubnormalUnit;
  }
  template <class P>
  static METAL_FUNC void unpack_scales(thread const Raw& raw, thread P& p) {
    MM_UNROLL
    for (int t = 0; t < 4; t += 2) {  // int8: flipping the sign bit adds 128
      const uint both = as_type<uint>(ushort2(raw.scales[t], raw.scales[t + 1])) ^ 0x64806480u;
      const half2 scale = as_type<half2>(both) - 1152.0h;
      p.scale[t] = float(scale.x);
      p.scale[t + 1] = float(scale.y);
    }
    p.d = float(raw.d);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = Storage::block(row, k / 256);
    const uint j = (k & 255) / 16, t = j / 2 & 3;
    const uint at = k / 256 * Storage::kBlockBytes;
    const uint4 low =
        load_inner16<width>(row, at, j / 8 * 64 + (t & 1) * 32 + (k & 16)) >> (t & 2) * 2;
    const uint4 high = load_inner16<width>(row, at, 128 + j / 8 * 32 + (k & 16)) >> 2 * t;
    bytes16((low & 0x0F0F0F0Fu) | (high & 0x03030303u) << 4, -32, w);
    const float d = load_half(b + 208) * float(as_type<char>(b[192 + j]));
    scale16(d, -0.0f, w);
  }
};

}  // namespace metalmm
