// nvfp4 and mxfp8: small floats with small floats for scales, chosen as MLX does.

#include "formats.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 64;

// Nearest e4m3 of a magnitude, ties to even, at most 448. Codes of e4m3 are numbered through, and
// in the place of the mantissa of f32 less the difference of the exponents' biases.
uint8_t e4m3_of(float size) {
  constexpr uint32_t kRebias = (127 - 7) << 3;
  size = size < 448 ? size : 448;
  if (size < 1 / 64.f) {  // steps of 2^-9
    return static_cast<uint8_t>(static_cast<int32_t>((size * 512 + kRounder) - kRounder));
  }
  const uint32_t bits = float_bits(size);
  return static_cast<uint8_t>(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - kRebias);
}

float e4m3_value(uint8_t code) {
  const int exponent = code >> 3, mantissa = code & 7;
  const int units = exponent ? (8 + mantissa) << (exponent - 1) : mantissa;
  return static_cast<float>(units) * (1 / 512.f);
}

}  // namespace

void quantize_nvfp4(const float* x, uint8_t* out) {
  constexpr int kGroup = 16;
  uint8_t q[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    if (i % kGroup == 0) out[i / kGroup] = e4m3_of(max_abs(range_of(x + i, kGroup)) / 6);
    const uint8_t s = out[i / kGroup];
    const float v = x[i] / e4m3_value(s);
    const float size = magnitude(v);
    // Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a tie takes the smaller.
    constexpr float kMiddle[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    int32_t code = 0;
    for (const float middle : kMiddle) code += size > middle;
    q[i] = static_cast<uint8_t>(s == 0 ? 0 : code | ((v < 0) & (code > 0)) << 3);
  }
  join_fields<4, 8>(q, kBlock, out + 4);
}

void quantize_mxfp8(const float* x, uint8_t* out) {
  constexpr int kGroup = 32;
  for (int i = 0; i < kBlock; ++i) {
    if (i % kGroup == 0) {
      // The least e with max|x| <= 448 * 2^(e - 127), the mantissa of 448 being 1.75.
      const float top = max_abs(range_of(x + i, kGroup));
      const uint32_t bits = float_bits(top);
      const int e = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
      out[i / kGroup] = static_cast<uint8_t>(top == 0 ? 127 : e < 0 ? 0 : e);
    }
    const uint32_t e = out[i / kGroup];
    const float v = x[i] / bits_float(e ? e << 23 : 0x00400000u);
    out[2 + i] = static_cast<uint8_t>(e4m3_of(magnitude(v)) | float_bits(v) >> 31 << 7);
  }
}

}  // namespace metalmm::cpu::quant
