// The dot kernels of formats with steps (step.h): included by isa.cpp.
#pragma once

#include "cpu/dot.h"
#include "step.h"

#if defined(__AVX512F__)

namespace metalmm::cpu::MM_ISA {

// Floats of a step of one row of x: the values, and the sums that offsets multiply.
template <class Codec>
constexpr int kStepFloats = Steps<Codec>::kValues + (Steps<Codec>::kOffset ? kWidth : 0);

// Rows of W per pass. Zen 4, q4_k, M = 4: three rows 0.80 ms, two 0.83.
constexpr int step_rows(int m) { return m == 1 ? 4 : 3; }

// The distance ahead of a step at which its row is fetched.
constexpr int kStepPrefetchBytes = 1024;

// Owner: one thread; kRows rows of W at a time against all kM rows of x.
// Traffic: as Dot has it: each block of W once, x once per kRows rows, rows of a pass a kRows-th of
//   the range apart.
// Needs: x arranged by arrange(), beyond the last whole step interleaved as for Dot.
// The sum of levels times x is scaled, not each weight, and an offset multiplies sums of x.
template <class Codec, int kRows, int kM>
struct StepDot {
  using S = Steps<Codec>;
  using Step = typename S::Step;

  // sums = levels times x, over the pairs of a fold.
  template <int kPair>
  static MM_INLINE void multiply(const Step* s, const float* x, F (&sums)[kRows][kM]) {
    constexpr bool kStarts = kPair % S::kPairsOfFold == 0;
    F low[kRows], high[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i levels = S::template pair<kPair>(s[r]);
      low[r] = low_words(levels);
      high[r] = high_words(levels);
    }
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const F v = in_register(load(x + (2 * kPair * kM + m) * kWidth));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r][m] = kStarts ? low[r] * v : fma(low[r], v, sums[r][m]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const F v = in_register(load(x + ((2 * kPair + 1) * kM + m) * kWidth));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][m] = fma(high[r], v, sums[r][m]);
    }
    if constexpr ((kPair + 1) % S::kPairsOfFold != 0) multiply<kPair + 1>(s, x, sums);
  }

  template <int kFold>
  static MM_INLINE void folds(const Step* s, const float* x, F (&acc)[kRows][kM]) {
    constexpr int kFirst = kFold * S::kPairsOfFold;
    F sums[kRows][kM];
    multiply<kFirst>(s, x, sums);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F scale = S::template scale<kFold>(s[r]);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) acc[r][m] = fma(sums[r][m], scale, acc[r][m]);
    }
    if constexpr (kFirst + S::kPairsOfFold < S::kPairs) folds<kFold + 1>(s, x, acc);
  }

  static MM_INLINE void multiply_step(const Step* s, const float* x, F (&acc)[kRows][kM]) {
    folds<0>(s, x, acc);
    if constexpr (S::kOffset) {
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        const F sums = load(x + S::kValues * kM + m * kWidth);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][m] = fma(s[r].offset, sums, acc[r][m]);
      }
    }
  }

  static MM_INLINE void multiply_rows(const DotArgs& a, const uint8_t* const* p,
                                      F (&acc)[kRows][kM]) {
    const int64_t steps = a.weight.k / S::kValues;
    typename Codec::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Codec::row(p[r], a.weight.layout);
    const float* x = a.x;
    Step open[kRows];
    const Stream<Codec> stream(a.weight);
    for (int64_t step = 0; step < steps; ++step, x += kStepFloats<Codec> * kM) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        stream.fetch(p[r], step, S::kBytes, kStepPrefetchBytes);
        S::open(row[r], step, open[r]);
      }
      multiply_step(open, x, acc);
    }
    typename Codec::Block block[kRows];
    constexpr int kBlocks = S::kValues / Codec::kBlockValues;
    for (int64_t b = steps * kBlocks; b < a.weight.k / Codec::kBlockValues; ++b) {
      for (int r = 0; r < kRows; ++r) Codec::open(row[r], b, block[r]);
      Dot<Codec, kRows, kM>::multiply_block(block, x, acc);
      x += Codec::kBlockValues * kM;
    }
  }

  static void run(const DotArgs& a) { run_passes<Codec, StepDot, F[kM], kRows, kM>(a); }
};

// x of m rows, of which `rows` are stored, as the step kernels take it.
template <class Codec>
void arrange(const ArrangeArgs& a) {
  using S = Steps<Codec>;
  static constexpr auto kFrom = [] {
    struct {
      uint8_t value[S::kValues];
    } t{};
    for (int i = 0; i < S::kValues; ++i) {
      t.value[i] = static_cast<uint8_t>(S::value_at(i / 32, i / kWidth % 2, i % kWidth));
    }
    return t;
  }();
  float* out = a.out;
  for (int64_t first = 0; first + S::kValues <= a.k; first += S::kValues) {
    for (int64_t r = 0; r < a.rows; ++r) {
      const float* x = a.x + r * a.x_stride + first;
      for (int v = 0; v < S::kValues; v += kWidth) {
        float* to = out + v * a.rows + r * kWidth;
        for (int i = 0; i < kWidth; ++i) to[i] = r < a.m ? x[kFrom.value[v + i]] : 0.f;
      }
      if constexpr (S::kOffset) {
        float sums[kWidth] = {};
        for (int v = 0; v < S::kValues && r < a.m; v += kWidth) {
          sums[S::sum_of(v)] += sum(load(x + v));
        }
        std::memcpy(out + S::kValues * a.rows + r * kWidth, sums, sizeof sums);
      }
    }
    out += kStepFloats<Codec> * a.rows;
  }
}

}  // namespace metalmm::cpu::MM_ISA

#endif
