// GGML blocks of 256 values as integer codes, two chunks in a vector of AVX-512: half as many
// instructions as chunk by chunk. 32000 x 1024, cold, two threads (Zen 5): q4_k 0.85 of the time.
#pragma once

#include "codecs_k.h"

#if defined(__AVX512F__)
namespace metalmm::cpu::MM_ISA {

// The codes of chunks c and c + 1 of an open block, c even.
template <class Codec>
struct Pairs {
  static MM_INLINE __m512i codes(const typename Integers<Codec>::Block& k, int c) {
    const auto chunk = [&](int i) {
      return reinterpret_cast<__m256i>(Integers<Codec>::codes(k, i));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(chunk(c)), chunk(c + 1), 1);
  }
};

// 32 bytes in both halves, the words of the first rotated to the left by `first` bits, those of the
// second by `second`; negative: to the right.
MM_INLINE __m512i both(const uint8_t* p, int first, int second) {
  const __m256i second_bits = _mm256_set1_epi32(second);
  const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi32(first), second_bits, 1);
  return _mm512_rolv_epi32(_mm512_broadcast_i64x4(load_as<__m256i>(p)), bits);
}
MM_INLINE __m512i masked(__m512i v, uint8_t mask) {
  return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask)));
}
// low | (high & mask)
MM_INLINE __m512i joined(__m512i low, __m512i high, uint8_t mask) {
  const __m512i m = _mm512_set1_epi8(static_cast<char>(mask));
  return _mm512_ternarylogic_epi64(low, high, m, 0xf8);
}

template <>
struct Pairs<Q2_K> {
  static MM_INLINE __m512i codes(const GroupScales& k, int c) {
    return masked(both(k.b + 16 + c / 4 * 32, -2 * (c % 4), -2 * (c % 4) - 2), 3);
  }
};
template <>
struct Pairs<Q3_K> {
  static MM_INLINE __m512i codes(const GroupScales& k, int c) {
    const __m512i low = masked(both(k.b + 32 + c / 4 * 32, -2 * (c % 4), -2 * (c % 4) - 2), 3);
    return joined(low, both(k.b, 2 - c, 1 - c), 4);
  }
};
template <>
struct Pairs<Q4_K> {
  static MM_INLINE __m512i codes(const GroupScales& k, int c) {
    return masked(both(k.b + 16 + c / 2 * 32, 0, -4), 15);
  }
};
template <>
struct Pairs<Q5_K> {
  static MM_INLINE __m512i codes(const GroupScales& k, int c) {
    const __m512i low = masked(both(k.b + 48 + c / 2 * 32, 0, -4), 15);
    return joined(low, both(k.b + 16, 4 - c, 3 - c), 16);
  }
};
template <>
struct Pairs<Q6_K> {
  static MM_INLINE __m512i codes(const GroupScales& k, int c) {
    const int half_block = c / 4, t = c % 4;
    const __m512i ql = load_as<__m512i>(k.b + half_block * 64);
    const __m512i low = masked(t == 0 ? ql : _mm512_srli_epi16(ql, 4), 15);
    return joined(low, both(k.b + 128 + half_block * 32, 4 - 2 * t, 2 - 2 * t), 0x30);
  }
};

}  // namespace metalmm::cpu::MM_ISA
#endif
