// scale * code + bias, one scale and bias per group of 32, 64 or 128 values (a function constant).
// A row is three planes: codes (a little-endian bit stream) | scales | biases; K is a function
// constant, so that all distances are. Each lane owns 32 consecutive values: `bits` words of codes.
#pragma once

#include "piece.h"

namespace metalmm {

// Codes of a stream of 16-bit words: a field that starts at bit 0 ... 15 of a word ends below bit
// 23 of the word and the next one, so no code needs a shift. Two neighbours that are one 32-bit
// word of memory cost nothing to join.
template <int bits, int count>
struct AffineStream {
  MM_CONST int kWords = bits * count / 16;
  ushort words[kWords + 1];

  // Whether to read word i with the next one.
  static constexpr bool joined(int i) { return i % 2 == 0 || 16 * (i + 1) % bits != 0; }

  template <int i = 0>
  static METAL_FUNC void fields(thread const uint (&opened)[kWords], thread float (&q)[count]) {
    if constexpr (i < count) {
      q[i] = field<bits, i * bits % 16>(opened[i * bits / 16]);
      fields<i + 1>(opened, q);
    }
  }
  static METAL_FUNC void unpack(thread const AffineStream& s, thread float (&q)[count]) {
    uint opened[kWords];
    MM_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const uint both = as_type<uint>(ushort2(s.words[i], s.words[i + 1]));
      opened[i] = open_word(joined(i) ? both : s.words[i]);
    }
    fields(opened, q);
  }
};

// The planes of a row. A unit is kUnitValues values, the smallest group; so is kBlockValues here.
MM_CONST uint kUnitValues = 32;
template <int bits>
struct AffinePlanes {
  MM_CONST int kBlockValues = kUnitValues, kBlockBytes = 4 * bits;
  MM_CONST bool kHasWidths = false;
  static METAL_FUNC uint group_of(uint unit) {
    return unit >> (fc_group == kUnitValues ? 0 : fc_group == 2 * kUnitValues ? 1 : 2);
  }

  struct Cursor {
    device const uchar* codes;
    device const uchar* scale;
  };
  // Bytes of the scales, or of the biases, of so many units.
  static METAL_FUNC uint parameter_bytes(uint units) {
    return group_of(units) * (ScaleType(fc_scale_type) == ScaleType::kF32 ? 4 : 2);
  }
  // The place of the scale of a unit.
  static METAL_FUNC device const uchar* scale_of(Row row, uint unit) {
    return row + fc_k / 8 * bits + parameter_bytes(unit);
  }
  static METAL_FUNC uint to_bias() { return parameter_bytes(fc_k / kUnitValues); }
  static METAL_FUNC Cursor start(Row row, uint unit, uint) {
    return {row + unit * uint(4 * bits), scale_of(row, unit)};
  }
  // The units that a simdgroup takes are whole groups.
  static METAL_FUNC Cursor next(Cursor c, uint units) {
    return {c.codes + units * uint(4 * bits), c.scale + parameter_bytes(units)};
  }
  static METAL_FUNC Cursor moved(Cursor c, long distance) {
    return {c.codes + distance, c.scale + distance};
  }
  static METAL_FUNC uint row_bytes() {
    constexpr uint kAlignment = kAffineRowAlignment;
    return (fc_k / 8 * bits + 2 * to_bias() + kAlignment - 1) / kAlignment * kAlignment;
  }
};

template <int bits>
struct Affine {
  using Storage = AffinePlanes<bits>;
  using Pieces = PieceLayout<1, kUnitValues, kUnitValues, kUnitValues>;
  MM_CONST bool kHasChains = bits == 2 || bits == 4;
  using Terms =
      PieceTerms<1, 1, kHasChains ? 4 : 1, kHasChains ? bits : 0, bits == 2 ? kCrumbBias : 0, 1>;
  // Where codes do not cross bytes: field t of each byte is a chain.
  MM_CONST int kFields = 8 % bits == 0 ? 8 / bits : 0;
  using Subnormal =
      conditional_t<kFields != 0,
                    SubnormalTerms<1, 1, 0, 0, kFields, kFields == 1 ? 0 : bits, true>, void>;
  MM_CONST bool kHasCodebook = false;
  MM_CONST bool kDecodesHalves = bits == 4, kHalvesAreExact = bits != 4;
  struct Raw {
    uint words[bits];
    uint scale, bias;  // bits of a ScaleType
  };

  static METAL_FUNC uint parameter(device const uchar* p) {
    if (ScaleType(fc_scale_type) == ScaleType::kF32) return load_as<uint>(p);
    return load_as<ushort>(p);
  }
  static METAL_FUNC float value(uint parameter) {
    if (ScaleType(fc_scale_type) == ScaleType::kF16) return float(as_type<half>(ushort(parameter)));
    if (ScaleType(fc_scale_type) == ScaleType::kBF16)
      return float(as_type<bfloat>(ushort(parameter)));
    return as_type<float>(parameter);
  }
  static METAL_FUNC void fetch(typename Storage::Cursor c, uint, thread Raw& raw) {
    device const uchar* p = c.codes;
    MM_UNROLL
    for (int i = 0; i < bits; ++i) {
      if constexpr (bits % 4 == 0) {
        raw.words[i] = load_as<uint4>(p + i / 4 * 16)[i % 4];
      } else if constexpr (bits % 2 == 0) {
        raw.words[i] = load_as<uint2>(p + i / 2 * 8)[i % 2];
      } else {
        raw.words[i] = load_as<uint>(p + 4 * i);
      }
    }
    raw.scale = parameter(c.scale);
    raw.bias = parameter(c.scale + Storage::to_bias());
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Affine>& p) {
    AffineStream<bits, kUnitValues> stream;
    MM_UNROLL
    for (int i = 0; i < 2 * bits; ++i) {
      stream.words[i] = as_type<ushort2>(raw.words[i / 2])[i % 2];
    }
    stream.words[2 * bits] = 0;
    if constexpr (bits == 2) {
      MM_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint opened = open_word(stream.words[i]);
        byte_of_crumbs(low_byte_on_top(opened), p.q + 8 * i);
        byte_of_crumbs(high_byte_on_top(opened), p.q + 8 * i + 4);
      }
    } else if constexpr (bits == 4) {
      MM_UNROLL
      for (int i = 0; i < 8; ++i) {
        nibbles4(stream.words[i], p.q[4 * i], p.q[4 * i + 1], p.q[4 * i + 2], p.q[4 * i + 3]);
      }
    } else {
      AffineStream<bits, kUnitValues>::unpack(stream, p.q);
    }
    p.d = value(raw.scale);
    p.m = value(raw.bias);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook,
                                thread Piece<Affine, Subnormal>& p) {
    MM_UNROLL
    for (int i = 0; i < bits; ++i) fields_of_word<0>(raw.words[i], p.q + 32 / bits * i);
    p.d = value(raw.scale);
    p.m = value(raw.bias);
  }
  // Field t of each byte, times 2^(bits t).
  template <int t>
  static METAL_FUNC void fields_of_word(uint word, thread float* q) {
    subnormals4<bits, bits * t, kFields>(word, q + t);
    if constexpr (t < kFields - 1) fields_of_word<t + 1>(word, q);
  }

  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* p = row + k / 16 * uint(2 * bits);
    AffineStream<bits, 16> stream;
    MM_UNROLL
    for (int i = 0; i < bits; ++i) {
      if constexpr (bits == 8) {
        stream.words[i] = as_type<ushort2>(load_as<uint4>(p)[i / 2])[i % 2];
      } else if constexpr (bits == 4) {
        stream.words[i] = load_as<ushort4>(p)[i];
      } else if constexpr (bits % 2 == 0) {
        stream.words[i] = load_as<ushort2>(p + i / 2 * 4)[i % 2];
      } else {
        stream.words[i] = load_as<ushort>(p + 2 * i);
      }
    }
    stream.words[bits] = 0;
    AffineStream<bits, 16>::unpack(stream, w);
    device const uchar* at = Storage::scale_of(row, k / kUnitValues);
    const float scale = value(parameter(at)), bias = value(parameter(at + Storage::to_bias()));
    MM_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float product = scale * w[i];  // rounded on its own where scales are f32
      w[i] = product + bias;
    }
  }
  // Codes of 4 bits: in half precision where scales are halves, two codes at a time.
  static METAL_FUNC void decode16(Row row, uint k, thread half (&w)[16]) {
    if (ScaleType(fc_scale_type) != ScaleType::kF16) {
      float wide[16];
      decode16(row, k, wide);
      MM_UNROLL
      for (int i = 0; i < 16; ++i) w[i] = half(wide[i]);
      return;
    }
    // Only what is used of these 16 bytes is loaded; so addressed, both halves of a unit cost
    // gemm_small 64 registers instead of 68, 260 instructions instead of 268 (ptxas 13.0).
    const uint4 both = load_as<uint4>(row + k / kUnitValues * uint(4 * bits));
    const uint2 words = (k & 16) != 0 ? both.zw : both.xy;
    device const uchar* at = Storage::scale_of(row, k / kUnitValues);
    const half2 scale = half2(load_as<half>(at));
    const half2 bias = half2(load_as<half>(at + Storage::to_bias()));
    MM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint word = as_type<uint>(ushort2(half_word(words.x, i), half_word(words.y, i)));
      const uint low = open_pair(word), high = open_pair(word >> 8);
      const half2 pairs[4] = {even_nibbles(low), odd_nibbles(low), even_nibbles(high),
                              odd_nibbles(high)};
      MM_UNROLL
      for (int j = 0; j < 4; ++j) {
        const half2 two = fma(pairs[j], scale, bias);
        w[4 * i + j] = two.x;
        w[4 * i + j + 8] = two.y;
      }
    }
  }

 private:
  // Four codes, times 1, 4, 16 and 64, all but the first with kCrumbBias.
  static METAL_FUNC void byte_of_crumbs(uint on_top, thread float* q) {
    q[0] = crumb_on_top<0>(on_top) - float(kCrumbBias);
    q[1] = crumb_on_top<1>(on_top);
    q[2] = crumb_on_top<2>(on_top);
    q[3] = crumb_on_top<3>(on_top);
  }
  // The first and the second nibble of both halves of a word.
  static METAL_FUNC half2 even_nibbles(uint opened) { return pair<4, 0>(opened) - 1024.0h; }
  static METAL_FUNC half2 odd_nibbles(uint opened) {
    return fma(pair<4, 4>(opened), half2(1 / 16.0h), half2(-64.0h));
  }
};
using Affine2 = Affine<2>;
using Affine3 = Affine<3>;
using Affine4 = Affine<4>;
using Affine5 = Affine<5>;
using Affine6 = Affine<6>;
using Affine8 = Affine<8>;

}  // namespace metalmm
