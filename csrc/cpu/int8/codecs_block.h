// GGML blocks of 32 values as integer codes.
//
// Integers<Codec>, for a codec of cpu/codecs/, is a struct of static functions:
//   kKind   what the format needs of a kernel
//   Block   what is computed once per block;  void open(const Codec::Row&, int64_t block, Block&),
//           which may keep what the block before left there
//   codes(block, chunk)          the chunk's codes, a byte each, in the order of the values
//   scales(block), mins(block)   of the groups of the block
// A format without a specialisation has no integer codes: its products are exact.
#pragma once

#include "cpu/codecs/block.h"
#include "vectors.h"

namespace metalmm::cpu::MM_ISA {

template <class Codec>
struct Integers {
  static constexpr int8::Kind kKind{};
};

MM_INLINE float half_value(const uint8_t* p) {
#if defined(__AVX512F__)
  return half_table[load_as<uint16_t>(p)];
#else
  return half_to_float(p);
#endif
}

// Nibble order of the 32-blocks: byte j holds value j (low) and j + 16 (high).
MM_INLINE Bytes nibble_bytes(const uint8_t* qs) {
#if defined(__AVX2__)
  const __m256i both = _mm256_broadcastsi128_si256(load_as<__m128i>(qs));
  return reinterpret_cast<Bytes>(_mm256_srlv_epi64(both, _mm256_set_epi64x(4, 4, 0, 0))) & 15;
#else
  uint8_t both[kChunkValues];
  std::memcpy(both, qs, 16);
  std::memcpy(both + 16, qs, 16);
  for (int i = 0; i < 16; ++i) {
    both[i] &= 15;
    both[16 + i] >>= 4;
  }
  return load_bytes(both);
#endif
}

// 16 in the bytes whose bit of the word is set (byte i, bit i).
MM_INLINE Bytes fifth_bits(uint32_t word) {
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  return reinterpret_cast<Bytes>(_mm256_maskz_set1_epi8(word, 16));
#elif defined(__AVX2__)
  const __m256i source = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(word)),
      _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(source, bit), bit);
  return reinterpret_cast<Bytes>(set) & 16;
#else
  uint8_t bits[kChunkValues];
  for (int i = 0; i < kChunkValues; ++i) bits[i] = static_cast<uint8_t>((word >> i & 1) << 4);
  return load_bytes(bits);
#endif
}

// table[code] of codes below 16.
MM_INLINE Bytes look_up(const uint8_t* table, Bytes codes) {
#if defined(__AVX2__)
  const __m256i both = _mm256_broadcastsi128_si256(load_as<__m128i>(table));
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(both, reinterpret_cast<__m256i>(codes)));
#else
  uint8_t bytes[kChunkValues];
  std::memcpy(bytes, &codes, sizeof bytes);
#if defined(MM_NEON)
  const uint8x16_t levels = vld1q_u8(table);
  for (int i = 0; i < kChunkValues; i += 16) {
    vst1q_u8(bytes + i, vqtbl1q_u8(levels, vld1q_u8(bytes + i)));
  }
#else
  for (uint8_t& b : bytes) b = table[b];
#endif
  return load_bytes(bytes);
#endif
}

// values[i] + offset, as bytes.
struct ByteTable {
  alignas(16) uint8_t entry[16];
};
constexpr ByteTable byte_table(const float* values, int offset) {
  ByteTable out{};
  for (int i = 0; i < 16; ++i) {
    out.entry[i] = static_cast<uint8_t>(static_cast<int>(values[i]) + offset);
  }
  return out;
}
constexpr int kIQ4Offset = 128, kFP4Offset = 12;
inline constexpr ByteTable kIQ4Bytes = byte_table(kIQ4Levels, kIQ4Offset);
inline constexpr ByteTable kFP4Bytes = byte_table(kFP4Doubled, kFP4Offset);

// What the formats of 32 values have: a scale, a minimum or none, and where the codes are.
struct ScaledBlock {
  float d, m;
  const uint8_t* b;
};
template <class Codec, bool has_min, int offset, bool wide = false>
struct OneScale {
  static constexpr int8::Kind kKind{kChunkValues, has_min, wide, offset};
  using Block = ScaledBlock;
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    k.b = Codec::at(row, block);
    k.d = half_value(k.b);
    if (has_min) k.m = half_value(k.b + 2);
  }
  static MM_INLINE const float* scales(const Block& k) { return &k.d; }
  static MM_INLINE const float* mins(const Block& k) { return &k.m; }
};

template <>
struct Integers<Q4_0> : OneScale<Q4_0, false, 8> {
  static MM_INLINE Bytes codes(const Block& k, int) { return nibble_bytes(k.b + 2); }
};
template <>
struct Integers<Q4_1> : OneScale<Q4_1, true, 0> {
  static MM_INLINE Bytes codes(const Block& k, int) { return nibble_bytes(k.b + 4); }
};
template <>
struct Integers<Q5_0> : OneScale<Q5_0, false, 16> {
  static MM_INLINE Bytes codes(const Block& k, int) {
    return nibble_bytes(k.b + 6) | fifth_bits(load_as<uint32_t>(k.b + 2));
  }
};
template <>
struct Integers<Q5_1> : OneScale<Q5_1, true, 0> {
  static MM_INLINE Bytes codes(const Block& k, int) {
    return nibble_bytes(k.b + 8) | fifth_bits(load_as<uint32_t>(k.b + 4));
  }
};
template <>
struct Integers<Q8_0> : OneScale<Q8_0, false, 128, true> {
  static MM_INLINE Bytes codes(const Block& k, int) { return load_bytes(k.b + 2) ^ 0x80; }
};
template <>
struct Integers<IQ4_NL> : OneScale<IQ4_NL, false, kIQ4Offset, true> {
  static MM_INLINE Bytes codes(const Block& k, int) {
    return look_up(kIQ4Bytes.entry, nibble_bytes(k.b + 2));
  }
};
template <>
struct Integers<MXFP4> : OneScale<MXFP4, false, kFP4Offset> {
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    k.b = MXFP4::at(row, block);
    k.d = MXFP4::half_scale(k.b[0]);
  }
  static MM_INLINE Bytes codes(const Block& k, int) {
    return look_up(kFP4Bytes.entry, nibble_bytes(k.b + 1));
  }
};

}  // namespace metalmm::cpu::MM_ISA
