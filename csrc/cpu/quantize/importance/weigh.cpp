#include "weigh.h"

#include <cmath>
#include <cstring>

#include "cpu/quantize/quantize.h"

namespace metalmm::cpu {

void normalise_importance(float* importance, int64_t k) {
  float top = 0;
  for (int64_t i = 0; i < k; ++i) top = importance[i] > top ? importance[i] : top;
  int exponent = 0;
  std::frexp(top, &exponent);
  for (int64_t i = 0; i < k; ++i) {
    const float v = top > 0 ? std::ldexp(importance[i], 1 - exponent) : 1;
    importance[i] = v > 0x1p-40f ? v : 0x1p-40f;
  }
}

namespace quant {

void weigh(const float* x, const float* importance, int64_t k, int64_t size, float spread,
           float* w) {
  if (spread == 0) {
    std::memcpy(w, importance, sizeof(float) * k);
    return;
  }
  for (int64_t first = 0; first < k; first += size) {
    float sum = 0;
    for (int64_t i = first; i < first + size; ++i) sum += x[i] * x[i];
    const float mean = sum * spread / static_cast<float>(size);
    for (int64_t i = first; i < first + size; ++i) {
      w[i] = importance[i] * std::sqrt(mean + x[i] * x[i]);
    }
  }
}

}  // namespace quant
}  // namespace metalmm::cpu
