// The weights of a search from the importance of columns. As torch_metalmm/formats/_importance.py.
#pragma once

#include <cstdint>

namespace metalmm::cpu::quant {

// w[i] = importance[i] * sqrt(s + x[i]^2), s = spread * the mean of x^2 over each `size` values of
// the k; spread 0: w = importance.
void weigh(const float* x, const float* importance, int64_t k, int64_t size, float spread,
           float* w);

#pragma GCC visibility push(hidden)

// `blocks` blocks of x with the weights w, by the rules of the Python class of that name.
#define MM_WEIGHTED(name, ...) \
  void weighted_##name(const float* x, const float* w, int64_t blocks, uint8_t* out);
#include "weighted.def"

#pragma GCC visibility pop

template <int kValues, int kBytes, void kPack(const float*, const float*, uint8_t*)>
inline void each_block(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b) kPack(x + b * kValues, w + b * kValues, out + b * kBytes);
}

}  // namespace metalmm::cpu::quant
