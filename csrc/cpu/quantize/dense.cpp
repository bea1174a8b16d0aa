#include <cstring>

#include "formats.h"
#include "math.h"

namespace metalmm::cpu::quant {
namespace {

// out = kConvert(x), so few values at a time that the rounded ones stay in registers or L1.
template <uint16_t kConvert(float)>
void convert(const float* x, int64_t k, uint8_t* out) {
  constexpr int64_t kAtOnce = 256;
  uint16_t rounded[kAtOnce];
  for (int64_t first = 0; first < k; first += kAtOnce) {
    const int64_t n = k - first < kAtOnce ? k - first : kAtOnce;
    for (int64_t i = 0; i < n; ++i) rounded[i] = kConvert(x[first + i]);
    std::memcpy(out + 2 * first, rounded, 2 * n);
  }
}

}  // namespace

void quantize_f32(const float* x, int64_t k, uint8_t* out) {
  std::memcpy(out, x, sizeof(float) * k);
}
void quantize_f16(const float* x, int64_t k, uint8_t* out) { convert<to_half>(x, k, out); }
void quantize_bf16(const float* x, int64_t k, uint8_t* out) { convert<to_bfloat>(x, k, out); }

}  // namespace metalmm::cpu::quant
