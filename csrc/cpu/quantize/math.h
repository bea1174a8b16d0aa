// Scalar arithmetic shared by the quantizers, without branches where a loop over it is to become
// SIMD. Baseline x86-64 has no f16 and no rounding instructions, and old gcc no _Float16.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/half.h"

namespace metalmm::cpu::quant {

// A group whose largest |x| is below this is stored as zeros by the searched formats.
constexpr float kTiny = 1e-15f;

inline uint32_t float_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// |v| without a library call, so that loops over it vectorise.
inline float magnitude(float v) { return bits_float(float_bits(v) & 0x7fffffffu); }

// From the exponent of f16 to that of f32.
constexpr uint32_t kHalfRebias = (127 - 15) << 23;

// Nearest f16, ties to even; from 65520 on Inf.
inline uint16_t to_half(float v) {
  const uint32_t bits = float_bits(v);
  const uint32_t mag = bits & 0x7fffffffu;
  const uint32_t normal = (mag - kHalfRebias + 0xfff + ((mag >> 13) & 1)) >> 13;
  // Below 2^-14 the last place of f16 is 2^-24, the spacing of f32 at 0.5: the addition rounds.
  const uint32_t small = float_bits(bits_float(mag) + 0.5f) - 0x3f000000u;
  uint32_t half = mag < kHalfRebias + (1u << 23) ? small : normal;
  half = mag >= 0x477ff000u ? 0x7c00u : half;
  half = mag > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

inline float from_half(uint16_t half) { return half_bits_to_float(half); }

// Nearest bf16, ties to even; v is not NaN.
inline uint16_t to_bfloat(float v) {
  const uint32_t bits = float_bits(v);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store_u16(uint8_t* out, uint16_t v) { std::memcpy(out, &v, sizeof v); }

// Writes the nearest f16 of v and returns what it decodes to.
inline float store_half(uint8_t* out, float v) {
  const uint16_t half = to_half(v);
  store_u16(out, half);
  return from_half(half);
}

// Adding 1.5 * 2^23 rounds to an integer, ties to even, for |v| < 2^22.
constexpr float kRounder = 12582912.f;

// v clamped to [low, high], NaN to low.
inline float clamp(float v, float low, float high) {
  v = v > low ? v : low;
  return v < high ? v : high;
}

// rint(v) clamped to [low, high], |low| and |high| < 2^22; NaN to low.
inline float to_code(float v, float low, float high) {
  return clamp((v + kRounder) - kRounder, low, high);
}

// The integer part of a code of 0 to 255.
inline uint8_t code_byte(float code) { return static_cast<uint8_t>(static_cast<int32_t>(code)); }

// 1 / d, and 0 where d is 0.
inline float reciprocal(float d) { return d == 0 ? 0.f : 1 / d; }

// The element of largest |x|, sign kept, the first one of equals; +0 if all are 0.
inline float signed_max(const float* x, int n) {
  float best = 0, best_abs = 0;
  for (int i = 0; i < n; ++i) {
    const float size = magnitude(x[i]);
    best = size > best_abs ? x[i] : best;
    best_abs = size > best_abs ? size : best_abs;
  }
  return best;
}

}  // namespace metalmm::cpu::quant
