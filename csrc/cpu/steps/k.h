// Steps of the formats of blocks of 256 values: one block each. The contract is in step.h.
#pragma once

#include "cpu/codecs/k.h"
#include "step.h"

namespace metalmm::cpu::MM_ISA {

#if defined(__AVX512F__)

// A block of 256 values.
template <int kBlockBytes>
struct BlockStep {
  static constexpr int kValues = 256, kBytes = kBlockBytes, kPairs = 8, kPairsOfFold = 2;
  static constexpr bool kOffset = false;
};

// A fold is a field of 2 bits of 64 bytes, its pairs the even and the odd ones.
template <int kBlockBytes>
struct FieldStep : BlockStep<kBlockBytes> {
  template <int kFold, class Step>
  static MM_INLINE F scale(const Step& s) {
    return permute(s.scale, fours(2 * kFold, 2 * kFold + 1, 2 * kFold + 8, 2 * kFold + 9));
  }
  static constexpr int value_at(int pair, int high, int lane) {
    const int byte = byte_at(pair % 2, high, lane);
    return byte / 32 * 128 + pair / 2 * 32 + byte % 32;
  }
};

// A fold has four scales.
template <int kBlockBytes>
struct FourScales : BlockStep<kBlockBytes> {
  template <int kFold, class Step>
  static MM_INLINE F scale(const Step& s) {
    return permute(s.scale, fours(4 * kFold, 4 * kFold + 1, 4 * kFold + 2, 4 * kFold + 3));
  }
};

// scale code + offset, 16 of each.
template <>
struct Steps<Q2_K> : FieldStep<84> {
  static constexpr bool kOffset = true;
  struct Step {
    const uint8_t* codes;
    F scale, offset;
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    const uint8_t* b = row + step * kBytes;
    const I bytes = load_u8(b);
    s = {b + 16, to_float(bytes & 15) * half(b + 80), to_float(bytes >> 4) * minus_half(b + 82)};
  }
  // A fold is a field of 2 bits, its pairs the even and the odd bytes.
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    static constexpr Levels kLevels = integers_from<4>(0);
    return kLevels(right<kPair / 2 * 2>(load_as<__m512i>(s.codes + kPair % 2)));
  }
  static constexpr int sum_of(int value) { return value / 16; }
};

template <>
struct Steps<Q3_K> : FieldStep<110> {
  struct Step {
    __m512i low, high;
    F scale;
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    Q3_K::Block k;
    Q3_K::open(row, step, k);
    s.scale = load(k.scale);
    s.low = load_as<__m512i>(k.b + 32);
    const __m512i bits = _mm512_broadcast_i64x4(load_as<__m256i>(k.b));
    s.high = _mm512_srlv_epi16(bits, halves(0, 4));  // the bit of field t: t
  }
  // A fold is a field of 2 bits with its third, its pairs the even and the odd bytes.
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    static constexpr Levels kLevels = integers_from<8>(-4);
    constexpr int kField = kPair / 2;
    const __m512i high = kField < 2 ? _mm512_slli_epi16(s.high, 2 - kField % 3)
                                    : right < kField<2 ? 0 : kField - 2>(s.high);
    const __m512i codes = select(_mm512_set1_epi8(3), right<2 * kField>(s.low), high);
    return kLevels(kPair % 2 ? odd_bytes(codes) : codes);
  }
};

// Chunks of 32 values by nibbles: bytes 0 to 31 of 64 hold chunk 0 (low) and 1 (high), bytes 32 to
// 63 chunk 2 and 3. A fold is a nibble of 64 bytes, its pairs the even and the odd bytes.
template <int kBlockBytes>
struct SixBitStep : BlockStep<kBlockBytes> {
  static constexpr bool kOffset = true;
  template <int kFold, class Step>
  static MM_INLINE F scale(const Step& s) {
    constexpr int kFirst = six_bit_scale(kFold / 2 * 4 + kFold % 2);
    return permute(s.offset, fours(kFirst, kFirst, kFirst + 2, kFirst + 2));
  }
  static constexpr int value_at(int pair, int high, int lane) {
    const int byte = byte_at(pair % 2, high, lane);
    return pair / 4 * 128 + byte / 32 * 64 + pair / 2 % 2 * 32 + byte % 32;
  }
  static constexpr int sum_of(int value) { return six_bit_scale(value / 32) + kSixBitOffset; }
};

template <>
struct Steps<Q4_K> : SixBitStep<144> {
  struct Step {
    const uint8_t* codes;
    F offset;  // beside the scales
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    const uint8_t* b = row + step * kBytes;
    s = {b + 16, six_bit_scales(b)};
  }
  // The odd bytes are loaded as such, but for those that a load would pass the block for.
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    static constexpr Levels kLevels = integers_from<16>(0);
    constexpr bool kLoaded = kPair < 4;
    constexpr int kShift = kPair / 2 % 2 * 4 + (kLoaded ? 0 : kPair % 2 * 8);
    const uint8_t* p = s.codes + kPair / 4 * 64;
    return kLevels(right<kShift>(load_as<__m512i>(p + (kLoaded ? kPair % 2 : 0))));
  }
};

template <>
struct Steps<Q5_K> : SixBitStep<176> {
  struct Step {
    const uint8_t* codes;
    __m512i bits;  // the fifth, of all chunks, twice
    F offset;      // beside the scales
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    const uint8_t* b = row + step * kBytes;
    s = {b + 48, _mm512_broadcast_i64x4(load_as<__m256i>(b + 16)), six_bit_scales(b)};
  }
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    static constexpr Levels kLevels = integers_from<32>(0);
    constexpr int kChunk = kPair / 4 * 4 + kPair / 2 % 2;  // and the one 2 beyond: bits to bit 4
    const __m512i bits = kChunk < 4 ? _mm512_sllv_epi16(s.bits, halves(4 - kChunk, 2 - kChunk))
                                    : _mm512_srlv_epi16(s.bits, halves(kChunk - 4, kChunk - 2));
    const __m512i nibbles = right<kPair / 2 % 2 * 4>(load_as<__m512i>(s.codes + kPair / 4 * 64));
    const __m512i codes = select(_mm512_set1_epi8(15), nibbles, bits);
    return kLevels(kPair % 2 ? odd_bytes(codes) : codes);
  }
};

template <>
struct Steps<Q6_K> : FourScales<210> {
  struct Step {
    __m512i codes[4];  // 6 bits in a byte, 64 values each
    F scale;
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    const uint8_t* b = row + step * kBytes;
    s.scale = to_float(load_s8(b + 192)) * half(b + 208);
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i ql = load_as<__m512i>(b + 64 * h);
      const __m512i qh = _mm512_broadcast_i64x4(load_as<__m256i>(b + 128 + 32 * h));
      s.codes[2 * h] = select(low, ql, _mm512_sllv_epi16(qh, halves(4, 2)));
      s.codes[2 * h + 1] =
          select(low, _mm512_srli_epi16(ql, 4), _mm512_srlv_epi16(qh, halves(0, 2)));
    }
  }
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    const __m512i codes = s.codes[kPair / 2];
    return integers_of_6_bits<-32>(kPair % 2 ? odd_bytes(codes) : codes);
  }
  static constexpr int value_at(int pair, int high, int lane) {
    return pair / 2 * 64 + byte_at(pair % 2, high, lane);
  }
};

template <>
struct Steps<IQ4_XS> : FourScales<136> {
  static constexpr int kPairsOfFold = 4;
  struct Step {
    const uint8_t* codes;
    F scale;  // 8 of them
  };
  static MM_INLINE void open(const uint8_t* row, int64_t step, Step& s) {
    const uint8_t* b = row + step * kBytes;
    const __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<int32_t>(b + 4)),
                                          _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<uint16_t>(b + 2) << 4),
                                           _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0));
    const __m256i six = _mm256_and_si256(
        _mm256_ternarylogic_epi32(_mm256_set1_epi32(15), low, high, 0xca), _mm256_set1_epi32(63));
    const __m256 v = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
    s = {b + 8, _mm512_castps256_ps512(v) * half(b)};
  }
  // A fold is 64 bytes, four chunks of 32 values; its pairs are their low and high nibbles.
  template <int kPair>
  static MM_INLINE __m512i pair(const Step& s) {
    static constexpr Levels kLevels = levels_of(kIQ4Levels);
    return kLevels(right<kPair % 4 * 4>(load_as<__m512i>(s.codes + kPair / 4 * 64)));
  }
  static constexpr int value_at(int pair, int high, int lane) {
    const int byte = byte_at(pair / 2 % 2, high, lane);
    return pair / 4 * 128 + byte / 16 * 32 + pair % 2 * 16 + byte % 16;
  }
};

#endif

}  // namespace metalmm::cpu::MM_ISA
