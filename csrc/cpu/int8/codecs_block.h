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
#if defined(__AVX2__)
  return half_table[load_as<uint16_t>(p)];
#else
  return half_to_float(p);
#endif
}

constexpr int kIQ4Offset = 128, kFP4Offset = 12;
inline constexpr ByteTable kFP4Bytes = byte_table(kFP4Doubled, kFP4Offset);

// The levels of IQ4 by nibbles, 128 added: by an instruction of its own where products take it off.
MM_INLINE Bytes iq4_levels(const uint8_t* p) {
  constexpr int kInTable = kWideCosts ? 0 : kIQ4Offset;
  static constexpr ByteTable kLevels = byte_table(kIQ4Levels, kInTable);
  return look_up(kLevels.entry, nibble_bytes(p)) ^ static_cast<uint8_t>(kInTable ^ kIQ4Offset);
}

// The fields of a block of 32 values: a scale, a minimum or none, and where the codes are.
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
    return nibble_bytes(k.b + 6) | spread_bits<16>(load_as<uint32_t>(k.b + 2));
  }
};
template <>
struct Integers<Q5_1> : OneScale<Q5_1, true, 0> {
  static MM_INLINE Bytes codes(const Block& k, int) {
    return nibble_bytes(k.b + 8) | spread_bits<16>(load_as<uint32_t>(k.b + 4));
  }
};
template <>
struct Integers<Q8_0> : OneScale<Q8_0, false, 128, true> {
  static MM_INLINE Bytes codes(const Block& k, int) { return load_bytes(k.b + 2) ^ 0x80; }
};
template <>
struct Integers<IQ4_NL> : OneScale<IQ4_NL, false, kIQ4Offset, true> {
  static MM_INLINE Bytes codes(const Block& k, int) { return iq4_levels(k.b + 2); }
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
