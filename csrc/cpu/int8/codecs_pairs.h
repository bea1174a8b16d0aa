// GGML blocks of 256 values as integer codes of two chunks a vector, for AVX-512: half as many
// conversions, and a third as many instructions as of q4_k chunk by chunk.
#pragma once

#include <type_traits>

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

// What a row of W gives with int8 x, two chunks at a time. Traffic: 2 bytes a value of x.
template <class Codec>
class PairSum {
  using Codes = Integers<Codec>;
  using Block = typename Codes::Block;
  static constexpr int8::Kind kKind = Codes::kKind;
  static constexpr int kGroups = Codec::kBlockValues / kKind.sub;
  using V = Floats<4 * kGroups>;  // a number of each group

 public:
  // Block b of the row.
  MM_INLINE void add(const Block& block, const int8::RoundedRow& x, int64_t b) {
    const V both = load_as<V>(Codes::scales(block)) * load_as<V>(x.scale + b * kGroups);
    __m512 scales;
    if constexpr (kGroups == 16) {
      scales = reinterpret_cast<__m512>(both);
    } else {
      scales = _mm512_castps256_ps512(reinterpret_cast<__m256>(both));
    }
    if constexpr (kKind.min) {
      const V added = load_as<V>(x.added + 4 * b * kGroups);
      mins_ = fma_of(added, load_as<V>(Codes::mins(block)), mins_);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; c += 2) {
      const int64_t at = (b * kChunks + c) * kChunkValues;
      Ints<64> sum = {};
      if constexpr (!kKind.min) sum = load_as<Ints<64>>(x.added + at);
      const __m512i w = Pairs<Codec>::codes(block, c);
      sum = dot<false>(sum, reinterpret_cast<Ints<64>>(w), load_as<Ints<64>>(x.codes + at));
      const __m512 of_groups = _mm512_permutexvar_ps(groups_of(c), scales);
      lanes_ = fma_of(__builtin_convertvector(sum, Floats<64>),
                      reinterpret_cast<Floats<64>>(of_groups), lanes_);
    }
  }

  MM_INLINE float total() const {
    __m512 sum = reinterpret_cast<__m512>(lanes_);
    if constexpr (kGroups == 16) sum = _mm512_add_ps(sum, reinterpret_cast<__m512>(mins_));
    auto half = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    if constexpr (kGroups == 8) half = _mm256_add_ps(half, reinterpret_cast<__m256>(mins_));
    return sum_of(reinterpret_cast<Floats<32>>(half));
  }

 private:
  static constexpr int kChunks = Codec::kBlockValues / kChunkValues;
  // Of each lane, which has four values, the group: from chunk c on.
  static MM_INLINE __m512i groups_of(int c) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i group = _mm512_srli_epi32(lane, kKind.sub == 32 ? 3 : 2);
    return _mm512_add_epi32(group, _mm512_set1_epi32(c * kChunkValues / kKind.sub));
  }

  Floats<64> lanes_ = {};
  V mins_ = {};
};

}  // namespace metalmm::cpu::MM_ISA
#endif
