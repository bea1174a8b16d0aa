// How a GPU quantizes: an Encoder for each format that formats.def says is stored, to the bytes of
// the CPU's quantizer. A block of 32 values lies on the lanes of a simdgroup.
//
//   static void store(device uchar* row, uint i, float x, uint lane)
//       value i of a row; of a format of blocks called by all lanes at once, i - lane a multiple of
//       32. A block with NaN or Inf decodes to no finite number.
//
// Where f32 has no subnormals, the codes of a block whose stored scale is 0 may be others.
// Each rounding is one of the CPU's, in its order: the division too, which Metal rounds as IEEE
// does where math_mode is safe. Codes are integers before they are compared with limits: what
// becomes of NaN in clamp() is not defined.
#pragma once

#include <metal_simdgroup>

#include "codebook.h"
#include "dense.h"

namespace metalmm {

template <class Format>
struct Encoder;  // of nibbles, below, unless specialized

template <class V>
struct Encoder<Dense<V>> {
  static METAL_FUNC void store(device uchar* row, uint i, float x, uint) {
    reinterpret_cast<device V*>(row)[i] = V(x);
  }
};

// ---- what blocks share

// v kept within [low, high]; NaN is low.
METAL_FUNC float code_within(float v, float low, float high) {
  v = v > low ? v : low;
  return v < high ? v : high;
}
METAL_FUNC float inverse_or_0(float d) { return d == 0.0f ? 0.0f : 1.0f / d; }

METAL_FUNC bool is_number(float x) { return (as_type<uint>(x) & 0x7F800000u) != 0x7F800000u; }

// A scale of the lanes' values x as it is stored: NaN unless all are numbers.
METAL_FUNC half stored_scale(float d, float x) {
  const uint others = simd_or(is_number(x) ? 0u : 1u);
  return others ? as_type<half>(ushort(0x7E00)) : half(d);
}
METAL_FUNC void store_half(device uchar* to, half v) { *reinterpret_cast<device half*>(to) = v; }

// x of the first lane where `mine`; of the last lane where none is.
METAL_FUNC float first_of(bool mine, float x, uint lane) {
  return simd_shuffle(x, ushort(simd_min(mine ? lane : uint(kSimdWidth - 1))));
}

// The element of largest |x|, the first of equals; +0 where all are 0.
METAL_FUNC float signed_largest(float x, uint lane) {
  const float size = fabs(x), largest = simd_max(size);
  const float top = first_of(size == largest, x, lane);
  return top == 0.0f ? 0.0f : top;
}

// Low nibbles of 32 codes as 16 bytes.
METAL_FUNC void store_nibbles(device uchar* to, uint code, uint lane) {
  const uint other = simd_shuffle_xor(code, ushort(16));
  if (lane < 16) to[lane] = uchar((code & 15) | (other & 15) << 4);
}
// Bit 4 of 32 codes as 4 bytes.
METAL_FUNC void store_fifths(device uchar* to, uint code, uint lane) {
  const uint bits = simd_or((code >> 4 & 1) << lane);
  if (lane < 4) to[lane] = uchar(bits >> 8 * lane);
}

// d = signed largest / -h and trunc(x / d + h + 0.5), h = 2^(bits - 1).
template <int bits>
struct SymmetricCode {
  MM_CONST bool kHasMin = false, kHasFifth = bits == 5;
  float d;
  uint code;
  static METAL_FUNC SymmetricCode of(float x, uint lane) {
    const float h = float(1 << (bits - 1));
    const float d = signed_largest(x, lane) / -h;
    const float code = code_within(x * inverse_or_0(d) + (h + 0.5f), 0.0f, 2 * h - 1);
    return {d, uint(code)};
  }
};

// m = the least, d = (the largest - m) / n and trunc((x - m) / d + 0.5), n = 2^bits - 1.
template <int bits>
struct AsymmetricCode {
  MM_CONST bool kHasMin = true, kHasFifth = bits == 5;
  float d, m;
  uint code;
  static METAL_FUNC AsymmetricCode of(float x, uint lane) {
    const float n = float((1 << bits) - 1);
    float low = simd_min(x), high = simd_max(x);
    if (low == 0.0f || high == 0.0f) {  // the first zero's sign, as the CPU takes it
      const float zero = first_of(x == 0.0f, x, lane);
      low = low == 0.0f ? zero : low;
      high = high == 0.0f ? zero : high;
    }
    const float d = (high - low) / n;
    return {d, low, uint(code_within((x - low) * inverse_or_0(d) + 0.5f, 0.0f, n))};
  }
};

// ---- formats

template <class Format>
struct CodeOf;
template <>
struct CodeOf<Q4_0> {
  using Code = SymmetricCode<4>;
};
template <>
struct CodeOf<Q5_0> {
  using Code = SymmetricCode<5>;
};
template <>
struct CodeOf<Q4_1> {
  using Code = AsymmetricCode<4>;
};
template <>
struct CodeOf<Q5_1> {
  using Code = AsymmetricCode<5>;
};

// Scale, minimum, fifth bits, low nibbles.
template <class Format>
struct Encoder {
  using Code = typename CodeOf<Format>::Code;
  static METAL_FUNC void store(device uchar* row, uint i, float x, uint lane) {
    device uchar* to = row + i / 32 * Format::Storage::kBlockBytes;
    device uchar* codes = to + (Code::kHasMin ? 4 : 2);
    const Code c = Code::of(x, lane);
    const half scale = stored_scale(c.d, x);
    if constexpr (Code::kHasFifth) store_fifths(codes, c.code, lane);
    store_nibbles(codes + (Code::kHasFifth ? 4 : 0), c.code, lane);
    if (lane == 0) {
      store_half(to, scale);
      if constexpr (Code::kHasMin) store_half(to + 2, half(c.m));
    }
  }
};

template <>
struct Encoder<Q8_0> {
  static METAL_FUNC void store(device uchar* row, uint i, float x, uint lane) {
    device uchar* to = row + i / 32 * Q8_0::Storage::kBlockBytes;
    const float d = simd_max(fabs(x)) / 127.0f;
    const half scale = stored_scale(d, x);
    const int code = int(round(code_within(x * inverse_or_0(d), -129.0f, 128.0f)));
    to[2 + lane] = uchar(max(min(code, 127), -128));
    if (lane == 0) store_half(to, scale);
  }
};

// The scale is the best of 16 trials, a lane a trial: its sums run over the values in their order.
template <>
struct Encoder<IQ4_NL> {
  MM_CONST int kTries = 7;
  MM_CONST uint kTrials = 2 * kTries + 2;

  // The code of the level nearest to v, the upper one of a tie, 15 for NaN.
  static METAL_FUNC uint nearest(float v) {
    uint code = 0;
    for (int i = 0; i < 15; ++i) {
      const float middle = (float(kIQ4Levels[i]) + float(kIQ4Levels[i + 1])) / 2;
      code += v < middle ? 0 : 1;
    }
    return code;
  }

  // Factors of the trials: of the first, exactly the level -127 for the largest.
  static METAL_FUNC float factor(float top, uint trial) {
    const float level = float(kIQ4Levels[0]);
    if (trial == 0) return 1.0f / (-top / level);
    return (level + float(int(trial) - kTries - 1)) / top;
  }

  static METAL_FUNC float scale_of(float x, float top, uint lane) {
    const float inverse = factor(top, min(lane, kTrials - 1));
    float a = 0.0f, b = 0.0f;
    for (uint i = 0; i < uint(kSimdWidth); ++i) {
      const float value = simd_shuffle(x, ushort(i));
      const float level = float(kIQ4Levels[nearest(inverse * value)]);
      const float weighted = value * value * level;
      a += weighted * value;
      b += weighted * level;
    }
    float scale = simd_shuffle(a, ushort(0)) / simd_shuffle(b, ushort(0));
    float best = scale * simd_shuffle(a, ushort(0));
    for (uint trial = 1; trial < kTrials; ++trial) {
      const float ta = simd_shuffle(a, ushort(trial)), tb = simd_shuffle(b, ushort(trial));
      if (tb > 0.0f && ta * ta > best * tb) {
        scale = ta / tb;
        best = scale * ta;
      }
    }
    return scale;
  }

  static METAL_FUNC void store(device uchar* row, uint i, float x, uint lane) {
    device uchar* to = row + i / 32 * IQ4_NL::Storage::kBlockBytes;
    const float top = signed_largest(x, lane);
    const float d = fabs(top) < 1e-15f ? 0.0f : scale_of(x, top, lane);
    const half scale = stored_scale(d, x);
    store_nibbles(to + 2, nearest(x * inverse_or_0(d)), lane);
    if (lane == 0) store_half(to, scale);
  }
};

}  // namespace metalmm
