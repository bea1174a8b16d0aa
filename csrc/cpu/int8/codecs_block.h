// GGML blocks of 32 values as integer codes. The contract is in codes.h.
#pragma once

#include "codes.h"
#include "cpu/codecs/block.h"

namespace metalmm::cpu::MM_ISA {

constexpr int kFP4Offset = 12;
inline constexpr ByteTable kFP4Bytes = byte_table(kFP4Doubled, kFP4Offset);

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
