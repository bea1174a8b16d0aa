// tq1_0 and tq2_0: -1, 0 and 1 times the largest magnitude of 256 values.

#include "formats.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 256;

// q = 1 + x / d rounded to nearest, halves away from 0; returns d = max|x|.
float ternary_codes(const float* x, uint8_t* q) {
  const Range r = range_of(x, kBlock);
  const float d = magnitude(r.high > -r.low ? r.high : r.low);
  const float id = reciprocal(d);
  for (int i = 0; i < kBlock; ++i) {
    const float v = x[i] * id;
    q[i] = static_cast<uint8_t>((v >= 0.5f) + (v > -0.5f) + !(v == v));
  }
  return d;
}

// kCount bytes of kDigits digits of base 3 each, the first one of weight 81: the fraction of 243,
// rounded up to one of 256.
template <int kCount, int kDigits>
const uint8_t* join_digits(const uint8_t* q, uint8_t* out) {
  for (int i = 0; i < kCount; ++i) {
    int whole = 0, place = 81;
    for (int n = 0; n < kDigits; ++n, place /= 3) whole += place * q[n * kCount + i];
    out[i] = static_cast<uint8_t>((whole * 256 + 242) / 243);
  }
  return q + kCount * kDigits;
}

}  // namespace

void quantize_tq1_0(const float* x, uint8_t* out) {
  uint8_t codes[kBlock];
  store_u16(out + 52, to_half(ternary_codes(x, codes)));
  const uint8_t* q = join_digits<32, 5>(codes, out);
  q = join_digits<16, 5>(q, out + 32);
  join_digits<4, 4>(q, out + 48);
}

void quantize_tq2_0(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  store_u16(out + 64, to_half(ternary_codes(x, q)));
  join_fields<2, 32>(q, kBlock, out);
}

}  // namespace metalmm::cpu::quant
