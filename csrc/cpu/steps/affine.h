// Steps of the affine formats. The contract is in step.h.
#pragma once

#include "cpu/codecs/plane.h"
#include "step.h"

namespace metalmm::cpu::MM_ISA {

#if defined(__AVX512F__)

// The scales, or biases, of the groups of a step, one to a lane: lane i is of the values from
// i * values / 16 on, of which a group has 32 << group_shift.
//
// f16 and bf16 are spread as words: the load is of the step's groups alone, since the row may end
// with them.
template <int kValues>
struct StepParameters {
  struct Index {
    uint16_t half[16];  // lane -> f16 of the step
    uint16_t high[32];  // the upper word of a lane -> bf16 of the step
    int32_t lane[16];
  };
  static constexpr Index index(int group_shift) {
    Index t{};
    for (int i = 0; i < 16; ++i) {
      const int group = i * kValues / 16 >> (5 + group_shift);
      t.half[i] = t.high[2 * i + 1] = static_cast<uint16_t>(group);
      t.lane[i] = group;
    }
    return t;
  }
  static MM_INLINE F load(const uint8_t* plane, int64_t step, const AffineRow& row) {
    alignas(64) static constexpr Index kIndex[] = {index(0), index(1), index(2)};
    const Index& at = kIndex[row.group_shift];
    const int groups = kValues / 32 >> row.group_shift;
    const uint32_t mask = (1u << groups) - 1;
    if (row.type == DType::kF32) {
      const __m256 v = _mm256_maskz_loadu_ps(static_cast<__mmask8>(mask),
                                             reinterpret_cast<const float*>(plane) + step * groups);
      return _mm512_permutexvar_ps(load_as<__m512i>(at.lane), _mm512_castps256_ps512(v));
    }
    const __m128i v = _mm_maskz_loadu_epi16(static_cast<__mmask8>(mask), plane + 2 * step * groups);
    if (row.type == DType::kBF16) {
      return reinterpret_cast<F>(_mm512_maskz_permutexvar_epi16(
          0xaaaaaaaa, load_as<__m512i>(at.high), _mm512_castsi128_si512(v)));
    }
    return _mm512_cvtph_ps(
        _mm256_permutexvar_epi16(load_as<__m256i>(at.half), _mm256_castsi128_si256(v)));
  }
};

// scale * code + bias
template <int kStepValues, int kBits>
struct AffineStep {
  static constexpr int kValues = kStepValues, kBytes = kStepValues * kBits / 8;
  static constexpr bool kOffset = true;
  struct Step {
    const uint8_t* codes;
    F scale, offset;
  };
  template <class Row>
  static MM_INLINE void open(const Row& row, int64_t step, Step& s) {
    using Parameters = StepParameters<kValues>;
    s = {row.codes + step * kBytes, Parameters::load(row.scales, step, row),
         Parameters::load(row.biases, step, row)};
  }
  template <int kFold>
  static MM_INLINE F scale(const Step& s) {
    return s.scale;
  }
  static constexpr int sum_of(int value) { return value * kWidth / kValues; }
};

// Codes of 2 or 4 bits: 64 bytes, a field of their words a pair.
template <int kBits>
struct AffineFields : AffineStep<512 / kBits, kBits> {
  using Base = AffineStep<512 / kBits, kBits>;
  static constexpr int kPairs = 16 / kBits, kPairsOfFold = kPairs;
  template <int kPair>
  static MM_INLINE __m512i pair(const typename Base::Step& s) {
    static constexpr Levels kLevels = integers_from<1 << kBits>(0);
    return kLevels(right<kPair * kBits>(load_as<__m512i>(s.codes)));
  }
  static constexpr int value_at(int pair, int high, int lane) {
    return (2 * lane + high) * kPairs + pair;
  }
};
template <>
struct Steps<Affine2> : AffineFields<2> {};
template <>
struct Steps<Affine4> : AffineFields<4> {};

#if defined(__AVX512VBMI__)
// Rejected: 3 bits, for which get() has a table of f32: 2.6 cycles for 16 weights instead of 3.0 at
// M = 1, 6.0 instead of 5.1 at M = 4 (Zen 4).
//
// Codes of 5 or 6 bits: 64-bit word i of codes[k] holds 8 of them, from value 16 i + 8 k on. A
// pair is 4 of each word.
template <int kBits>
struct AffineStream : AffineStep<128, kBits> {
  using Base = AffineStep<128, kBits>;
  static constexpr int kPairs = 4, kPairsOfFold = 4;
  struct Step {
    __m512i codes[2];
    F scale, offset;
  };
  struct alignas(64) Spread {
    uint8_t byte[64];
  };
  static constexpr Spread spread(int k) {
    Spread t{};
    for (int i = 0; i < 64; ++i) t.byte[i] = static_cast<uint8_t>((i / 8 * 2 + k) * kBits + i % 8);
    return t;
  }
  template <int k>
  static MM_INLINE __m512i words(const uint8_t* p) {
    static constexpr Spread kSpread = spread(k);
    const __m512i rest = kBits == 5 ? _mm512_castsi128_si512(load_as<__m128i>(p + 64))
                                    : _mm512_castsi256_si512(load_as<__m256i>(p + 64));
    return _mm512_permutex2var_epi8(load_as<__m512i>(p), load_as<__m512i>(kSpread.byte), rest);
  }
  template <class Row>
  static MM_INLINE void open(const Row& row, int64_t step, Step& s) {
    typename Base::Step base;
    Base::open(row, step, base);
    s = {{words<0>(base.codes), words<1>(base.codes)}, base.scale, base.offset};
  }
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    constexpr uint64_t kAt = kPair % 2 * kBits, kNext = 2 * kBits;  // bits
    const __m512i codes = _mm512_multishift_epi64_epi8(
        _mm512_set1_epi64(kAt | (kAt + kNext) << 16 | (kAt + 2 * kNext) << 32 |
                          (kAt + 3 * kNext) << 48),
        s.codes[kPair / 2]);
    if constexpr (kBits == 6) {
      return integers_of_6_bits<0>(codes);
    } else {
      static constexpr Levels kLevels = integers_from<1 << kBits>(0);
      return kLevels(codes);
    }
  }
  template <int kFold>
  static MM_INLINE F scale(const Step& s) {
    return s.scale;
  }
  static constexpr int value_at(int pair, int high, int lane) {
    return lane / 2 * 16 + pair / 2 * 8 + (lane % 2 * 2 + high) * 2 + pair % 2;
  }
};
template <>
struct Steps<Affine5> : AffineStream<5> {};
template <>
struct Steps<Affine6> : AffineStream<6> {};
#endif

#endif

}  // namespace metalmm::cpu::MM_ISA
