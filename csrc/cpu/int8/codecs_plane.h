// Affine rows as integer codes. The contract is in codecs_block.h; a block is one chunk.
#pragma once

#include "codecs_block.h"
#include "cpu/codecs/plane.h"

namespace metalmm::cpu::MM_ISA {

// A chunk of a little-endian stream of kBits-bit codes, a byte each: every code is taken from the
// two bytes that it touches.
template <int kBits>
MM_INLINE Bytes stream_bytes(const uint8_t* p) {
  if constexpr (kBits == 8) {
    return load_bytes(p);
  } else {
#if defined(__AVX2__)
    // Each half of the vector gets the bytes of 16 codes: those of the second half end with the
    // chunk, or, of 3 bits, 4 bytes behind it, where a scale and a bias are. Each word gets the two
    // bytes of its code, whose bits a product moves to the upper byte.
    constexpr int kSecond = kBits > 4 ? 4 * kBits - 16 : 0;
    struct Pick {
      alignas(32) uint8_t byte[2][32];
      alignas(32) uint16_t factor[16];
    };
    static constexpr Pick kPick = [] {
      Pick t{};
      for (int i = 0; i < 32; ++i) {  // code i
        const int bit = i % 8 * kBits, word = i / 16 * 8 + i % 8;
        const int from = i / 8 * kBits + bit / 8 - i / 16 * kSecond;
        t.byte[i / 8 % 2][2 * word] = static_cast<uint8_t>(from);
        t.byte[i / 8 % 2][2 * word + 1] = static_cast<uint8_t>(from + 1);
        t.factor[word] = static_cast<uint16_t>(1 << (8 - bit % 8));
      }
      return t;
    }();
    const __m256i source = _mm256_set_m128i(load_as<__m128i>(p + kSecond), load_as<__m128i>(p));
    const auto eights = [&](int i) {
      const __m256i words = _mm256_shuffle_epi8(source, load_as<__m256i>(kPick.byte[i]));
      return _mm256_srli_epi16(_mm256_mullo_epi16(words, load_as<__m256i>(kPick.factor)), 8);
    };
    return reinterpret_cast<Bytes>(_mm256_packus_epi16(eights(0), eights(1))) &
           static_cast<uint8_t>((1 << kBits) - 1);
#else
    uint8_t codes[kChunkValues];
    for (int i = 0; i < kChunkValues; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, p + i * kBits / 8, kBits);
      for (int j = 0; j < 8; ++j) {
        codes[i + j] = static_cast<uint8_t>(word >> (j * kBits) & ((1 << kBits) - 1));
      }
    }
    return load_bytes(codes);
#endif
  }
}
#if defined(__AVX2__)
template <>
MM_INLINE Bytes stream_bytes<4>(const uint8_t* p) {
  const __m256i v = _mm256_cvtepu8_epi16(load_as<__m128i>(p));
  return reinterpret_cast<Bytes>(_mm256_or_si256(v, _mm256_slli_epi16(v, 4))) & 15;
}
template <>
MM_INLINE Bytes stream_bytes<2>(const uint8_t* p) {
  const __m256i v = _mm256_cvtepu8_epi32(_mm_loadu_si64(p));
  const __m256i pairs = _mm256_or_si256(v, _mm256_slli_epi32(v, 12));
  return reinterpret_cast<Bytes>(_mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 6))) & 3;
}
#endif

template <int kBits>
struct Integers<Affine<kBits>> {
  static constexpr int8::Kind kKind{kChunkValues, true, kBits == 8, 0};
  struct Block {
    float d, m;
    const uint8_t* codes;
  };
  static MM_INLINE float parameter(const uint8_t* plane, int64_t group, DType type) {
    if (type == DType::kF16) return half_value(plane + 2 * group);
    if (type == DType::kBF16) return bf16_to_float(plane + 2 * group);
    return load_as<float>(plane + 4 * group);
  }
  static MM_INLINE void open(const typename Affine<kBits>::Row& row, int64_t chunk, Block& k) {
    k.codes = row.codes + chunk * Affine<kBits>::kBlockBytes;
    const int64_t group = chunk >> row.group_shift;
    if (group << row.group_shift != chunk) return;
    k.d = parameter(row.scales, group, row.type);
    k.m = parameter(row.biases, group, row.type);
  }
  static MM_INLINE const float* scales(const Block& k) { return &k.d; }
  static MM_INLINE const float* mins(const Block& k) { return &k.m; }
  static MM_INLINE Bytes codes(const Block& k, int) { return stream_bytes<kBits>(k.codes); }
};

}  // namespace metalmm::cpu::MM_ISA
