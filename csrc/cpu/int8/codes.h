// Integers<Codec>, for a codec of cpu/codecs/, is a struct of static functions:
//   kKind   what the format needs of a kernel
//   Block   what is computed once per block;  void open(const Codec::Row&, int64_t block, Block&),
//           which may keep what the block before left there
//   codes(block, chunk)          the chunk's codes, a byte each, in the order of the values
//   scales(block), mins(block)   of the groups of the block
// A format without a specialisation has no integer codes: its products are exact.
#pragma once

#include "cpu/codecs/codec.h"
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

constexpr int kIQ4Offset = 128;

// The levels of IQ4 by nibbles, 128 added: by an instruction of its own where products take it off.
MM_INLINE Bytes iq4_levels(const uint8_t* p) {
  constexpr int kInTable = kWideCosts ? 0 : kIQ4Offset;
  static constexpr ByteTable kLevels = byte_table(kIQ4Levels, kInTable);
  return look_up(kLevels.entry, nibble_bytes(p)) ^ static_cast<uint8_t>(kInTable ^ kIQ4Offset);
}

}  // namespace metalmm::cpu::MM_ISA
