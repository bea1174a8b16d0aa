// Blocks of 32 values with one scale found from the range: q4_0 q4_1 q5_0 q5_1 q8_0 mxfp4.
// Codes use the unrounded f32 scale; only then is the scale rounded to f16.

#include "formats.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 32;

float first_equal(const float* x, float value) {
  int i = 0;
  while (x[i] != value) ++i;
  return x[i];
}

// The low and the high element, each the first of equals, so that the sign of a zero is defined.
Range first_range(const float* x) {
  Range r = range_of(x, kBlock);
  if (r.low == 0) r.low = first_equal(x, 0);
  if (r.high == 0) r.high = first_equal(x, 0);
  return r;
}

float max_abs(const float* x) { return max_abs(first_range(x)); }

// The element of largest |x|, the first one of equals; +0 if all are 0.
float signed_max32(const float* x) {
  const Range r = first_range(x);
  if (r.high > -r.low) return r.high;
  if (r.high < -r.low) return r.low;
  return signed_max(x, kBlock);
}

// q = min(trunc(x * (1 / d) + (h + 0.5)), 2h - 1), h = 2^(bits - 1); returns d = signed max / -h.
template <int kBits>
float symmetric_codes(const float* x, uint8_t* q) {
  constexpr float kHalf = 1 << (kBits - 1);
  const float d = signed_max32(x) / -kHalf;
  const float id = reciprocal(d);
  for (int i = 0; i < kBlock; ++i) {
    q[i] = code_byte(clamp(x[i] * id + (kHalf + 0.5f), 0.f, 2 * kHalf - 1));
  }
  return d;
}

struct ScaleOffset {
  float d, m;
};

// q = min(trunc((x - m) * (1 / d) + 0.5), n), n = 2^bits - 1; m = min(x), d = (max(x) - m) / n.
template <int kBits>
ScaleOffset asymmetric_codes(const float* x, uint8_t* q) {
  constexpr float kHigh = (1 << kBits) - 1;
  const Range r = first_range(x);
  const float d = (r.high - r.low) / kHigh;
  const float id = reciprocal(d);
  for (int i = 0; i < kBlock; ++i) {
    q[i] = code_byte(clamp((x[i] - r.low) * id + 0.5f, 0.f, kHigh));
  }
  return {d, r.low};
}

// floor(log2(v) rounded to f32), the exponent that ggml takes: 7.9999995 counts as 2^3. v >= 0; 0
// and subnormals give -127. With n = exponent + 1 and k = floor(log2 |n|), less 1 if n is a
// positive power of two (f32 is twice as dense below it), kRoundsUp[k] values just below 2^n round
// to n.
int floor_log2(float v) {
  static constexpr int kRoundsUp[] = {0, 1, 2, 5, 11, 22, 44, 88};
  const int32_t bits = static_cast<int32_t>(float_bits(v));
  const int exponent = (bits >> 23) - 127;
  const int n = exponent + 1;
  const int below = (1 << 23) - (bits & 0x7fffff);
  const int size = n < 0 ? -n : n;
  int k = -1;
  while (size >> (k + 1)) ++k;
  if (n > 0 && (size & (size - 1)) == 0) --k;
  return k >= 0 && below <= kRoundsUp[k] ? n : exponent;
}

}  // namespace

void quantize_q4_0(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  store_u16(out, to_half(symmetric_codes<4>(x, q)));
  join_fields<4, 16>(q, kBlock, out + 2);
}

void quantize_q5_0(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  store_u16(out, to_half(symmetric_codes<5>(x, q)));
  pack_fives(q, out + 2);
}

void quantize_q4_1(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  const ScaleOffset s = asymmetric_codes<4>(x, q);
  store_u16(out, to_half(s.d));
  store_u16(out + 2, to_half(s.m));
  join_fields<4, 16>(q, kBlock, out + 4);
}

void quantize_q5_1(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  const ScaleOffset s = asymmetric_codes<5>(x, q);
  store_u16(out, to_half(s.d));
  store_u16(out + 2, to_half(s.m));
  pack_fives(q, out + 4);
}

void quantize_q8_0(const float* x, uint8_t* out) {
  const float d = max_abs(x) / 127;
  const float id = reciprocal(d);
  store_u16(out, to_half(d));
  for (int i = 0; i < kBlock; ++i) {
    const float v = clamp(x[i] * id, -129.f, 128.f);
    const int32_t whole = static_cast<int32_t>(v);
    const float rest = v - static_cast<float>(whole);
    int32_t q = whole + (rest >= 0.5f) - (rest <= -0.5f);  // half away from zero
    q = q < 127 ? q : 127;
    out[2 + i] = static_cast<uint8_t>(q > -128 ? q : -128);
  }
}

void quantize_mxfp4(const float* x, uint8_t* out) {
  const float top = max_abs(x);
  int e = floor_log2(top) + 125;
  e = top == 0 || e < 0 ? 0 : e;
  out[0] = static_cast<uint8_t>(e);
  // 2^(e - 128): values are d * {0 1 2 3 4 6 8 12}, and a tie takes the smaller.
  const float d = bits_float(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
  const float middle[7] = {d * 0.5f, d * 1.5f, d * 2.5f, d * 3.5f, d * 5, d * 7, d * 10};
  uint8_t q[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const float size = magnitude(x[i]);
    int32_t code = 0;
    for (int t = 0; t < 7; ++t) code += size > middle[t];
    q[i] = static_cast<uint8_t>(code | ((x[i] < 0) & (code > 0)) << 3);
  }
  join_fields<4, 16>(q, kBlock, out + 1);
}

}  // namespace metalmm::cpu::quant
