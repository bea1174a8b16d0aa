// The softmax of attention and the sum that it weighs, for one instruction set: included by
// isa.cpp.
#pragma once

#include "cpu/simd.h"

namespace metalmm::cpu::MM_ISA {

// exp(x) for x <= 0, within 1 ulp; 0 below kExpLow, NaN of NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2: e^r by its polynomial of degree 6, scaled by 2^n.
constexpr float kExpLow = -87;
MM_INLINE F exp_negative(F x) {
  const F rounder = set1(12582912.f);  // 1.5 * 2^23: the sum's last place is 1
  const F shifted = fma(x, set1(1.44269504088896341f), rounder);
  const F n = shifted - rounder;
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.f;
  const I exponent = (reinterpret_cast<I>(shifted) << 23) + (127 << 23);
  const F value = y * reinterpret_cast<F>(exponent);
  return x < kExpLow ? F{} : value;
}

inline float top(const float* scores, int64_t n) {
  F best = F{} - __builtin_inff();
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const F v = load(scores + i);
    best = v > best ? v : best;
  }
  float out = -__builtin_inff();
  for (; i < n; ++i) out = scores[i] > out ? scores[i] : out;
  for (int lane = 0; lane < kWidth; ++lane) out = best[lane] > out ? best[lane] : out;
  return out;
}

inline float exponentials(float* scores, int64_t n, float top) {
  if (top == -__builtin_inff()) {  // no score but -inf, and perhaps NaN
    float total = 0;
    for (int64_t i = 0; i < n; ++i) {
      scores[i] = scores[i] == top ? 0 : scores[i];
      total += scores[i];
    }
    return total;
  }
  const F t = set1(top);
  F total = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const F e = exp_negative(load(scores + i) - t);
    store(scores + i, e);
    total += e;
  }
  if (i < n) {
    float tail[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      tail[lane] = i + lane < n ? scores[i + lane] : -__builtin_inff();
    }
    // A top of inf makes NaN of every lane, also of those that are no score.
    const F e = exp_negative(load(tail) - t);
    store(tail, e);
    for (int64_t j = i; j < n; ++j) scores[j] = tail[j - i];
    total += e;
  }
  return sum(total);
}

// Owner: one thread. Traffic: each value of the rows once for kM rows of weights; the sums of
// kColumns vectors of a row stay in registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kColumns = 1;
#else
constexpr int kColumns = 2;
#endif

template <int kM>
void weigh(const WeighArgs& a) {
  static_assert(kChunkValues % (kColumns * kWidth) == 0);
  for (int64_t d = 0; d < a.dim; d += kColumns * kWidth) {
    F acc[kM][kColumns];
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c)
        acc[m][c] = load(a.out + m * a.out_stride + d + c * kWidth);
    }
    const float* row = a.rows + d;
    for (int64_t t = 0; t < a.n; ++t, row += a.row_stride) {
      F v[kColumns];
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) v[c] = load(row + c * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        const F p = set1(a.p[m * a.p_stride + t]);
#pragma GCC unroll 2
        for (int c = 0; c < kColumns; ++c) acc[m][c] = fma(p, v[c], acc[m][c]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c)
        store(a.out + m * a.out_stride + d + c * kWidth, acc[m][c]);
    }
  }
}

constexpr AttentionKernels kAttention{top, exponentials, {weigh<1>, weigh<2>, weigh<4>, weigh<8>}};

}  // namespace metalmm::cpu::MM_ISA
