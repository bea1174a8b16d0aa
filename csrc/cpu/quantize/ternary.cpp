// tq1_0, tq2_0 and q2_0: -1, 0 and 1 times the largest magnitude of a block; q1_0: signs and the
// mean.

#include "formats.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 256;  // values of a block of tq1_0 and tq2_0

// q = 1 + x / d rounded to nearest, halves away from 0; returns d = max|x|.
template <int kValues>
float ternary_codes(const float* x, uint8_t* q) {
  const float d = max_abs(range_of(x, kValues));
  const float id = reciprocal(d);
  for (int i = 0; i < kValues; ++i) {
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
  store_u16(out + 52, to_half(ternary_codes<kBlock>(x, codes)));
  const uint8_t* q = join_digits<32, 5>(codes, out);
  q = join_digits<16, 5>(q, out + 32);
  join_digits<4, 4>(q, out + 48);
}

void quantize_tq2_0(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  store_u16(out + 64, to_half(ternary_codes<kBlock>(x, q)));
  join_fields<2, 32>(q, kBlock, out);
}

void quantize_q2_0(const float* x, uint8_t* out) {
  uint8_t q[64];
  store_u16(out, to_half(ternary_codes<64>(x, q)));
  pack_stream<2>(q, 64, out + 2);
}

void quantize_q1_0(const float* x, uint8_t* out) {
  float sum = 0;
  uint8_t signs[128];
  for (int i = 0; i < 128; ++i) {
    sum += magnitude(x[i]);
    signs[i] = x[i] >= 0;
  }
  store_u16(out, to_half(sum / 128));
  pack_stream<1>(signs, 128, out + 2);
}

}  // namespace metalmm::cpu::quant
