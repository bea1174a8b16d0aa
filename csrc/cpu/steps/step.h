// Steps: some blocks of a row, decoded to levels in the order that costs least, not in that of K.
// AVX-512 only.
//
// The codes of 64 bytes lie side by side in a register, none of them widened: a shift brings one
// code of each 16-bit word into its low bits, and a permute of words turns these into the bf16 of
// their levels, 32 at a time, of which a shift and a mask make two vectors of f32. That is 1.9
// operations for 16 weights on all four ports, where widening bytes, shifting and a table of f32
// take 2.5 on two or three. Scales are for sums, a fraction of an operation, and so are offsets. x
// is arranged once per call as the levels come. Zen 4, M = 1, cycles for 16 weights: q4_k 2.3 (by
// get() 3.8), q6_k 2.5 (4.3), affine4_g64 2.3 (3.0); docs/design.md says what becomes of rounding.
// Rejected for the blocks of 32 values, whose 16 bytes lie apart: four blocks put together by
// masked loads 2.5, by a permute of two loads 2.2, four copies of a block 2.6; q4_0 by get()
// takes 2.2.
//
// Steps<Codec> is a struct of
//   kValues, kBytes   of a step. kValues is 0: the format has none
//   kPairs            of vectors; each kPairsOfFold pairs in sequence share their scales
//   Step              what is computed once per step;  void open(const Row&, int64_t step, Step&)
//   pair<kPair>       the levels of two vectors, as 32 bf16: those of the first are the low words
//   scale<kFold>      what the levels of a pair are multiplied by, lane by lane
//   kOffset           whether a Step has an `offset`, whose lanes sums of x are multiplied by
//   value_at(pair, high, lane)   which value of the step stands there
//   sum_of(value)     the lane of offset for x from this value on, kWidth of it
#pragma once

#include "cpu/codecs/codec.h"

namespace metalmm::cpu::MM_ISA {

template <class Codec>
struct Steps {
  static constexpr int kValues = 0;
};

#if defined(__AVX512F__)

// The upper half of the bits of a float, whose lower half is zero.
constexpr uint16_t bf16_bits(float v) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, v) >> 16);
}

// Levels by the low 5 bits of a word, of which the code may be fewer. All are integers of at most
// 8 bits, so that a bf16 holds them.
struct alignas(64) Levels {
  uint16_t word[32];
  MM_INLINE __m512i operator()(__m512i codes) const {
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(word));
  }
};
// first, first + 1, ..., kCodes of them.
template <int kCodes>
constexpr Levels integers_from(int first) {
  Levels t{};
  for (int i = 0; i < 32; ++i) t.word[i] = bf16_bits(static_cast<float>(first + i % kCodes));
  return t;
}
constexpr Levels levels_of(const float (&values)[16]) {
  Levels t{};
  for (int i = 0; i < 32; ++i) t.word[i] = bf16_bits(values[i % 16]);
  return t;
}

// Levels by 6 bits: first, first + 1, ...
template <int kFirst>
MM_INLINE __m512i integers_of_6_bits(__m512i codes) {
  static constexpr Levels kLow = integers_from<32>(kFirst), kHigh = integers_from<32>(kFirst + 32);
  return _mm512_permutex2var_epi16(_mm512_load_si512(kLow.word), codes,
                                   _mm512_load_si512(kHigh.word));
}

// 32 bf16 as two vectors.
MM_INLINE F low_words(__m512i v) { return reinterpret_cast<F>(_mm512_slli_epi32(v, 16)); }
MM_INLINE F high_words(__m512i v) {
  return reinterpret_cast<F>(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(~0xffffu))));
}

// The byte of 64 whose code a lane of the low or high words gets, where the codes are the odd or
// the even bytes.
constexpr int byte_at(int odd, int high, int lane) { return 4 * lane + 2 * high + odd; }

// Words with their odd bytes in the place of the even ones.
MM_INLINE __m512i odd_bytes(__m512i v) { return _mm512_srli_epi16(v, 8); }

template <int kBits>
MM_INLINE __m512i right(__m512i words) {
  return kBits == 0 ? words : _mm512_srli_epi16(words, kBits);
}

// 16-bit words: `low` in the lower 32 bytes, `high` in the upper.
MM_INLINE __m512i halves(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi16(static_cast<int16_t>(low)),
                            _mm256_set1_epi16(static_cast<int16_t>(high)), 1);
}

// The bits of a where mask is set, those of b elsewhere.
MM_INLINE __m512i select(__m512i mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

MM_INLINE F permute(F v, __m512i index) { return _mm512_permutexvar_ps(index, v); }
// Lanes 4 i .. 4 i + 3 hold i.
MM_INLINE __m512i fours(int a, int b, int c, int d) {
  return _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a);
}

#endif

}  // namespace metalmm::cpu::MM_ISA
