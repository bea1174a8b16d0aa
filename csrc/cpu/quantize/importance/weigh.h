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

}  // namespace metalmm::cpu::quant

// A quantizer of pack_<name>(x, weights or nullptr, out), and the one that weighs.
#define MM_WITH_WEIGHTS(name, values, bytes)                                           \
  void quantize_##name(const float* x, uint8_t* out) { pack_##name(x, nullptr, out); } \
  void weighted_##name(const float* x, const float* w, int64_t blocks, uint8_t* out) { \
    for (int64_t b = 0; b < blocks; ++b) {                                             \
      pack_##name(x + b * values, w + b * values, out + b * bytes);                    \
    }                                                                                  \
  }
