// GGML blocks of codes beside one scale. The contract is in codec.h.
#pragma once

#include "codec.h"

namespace metalmm::cpu::MM_ISA {

template <const float (&kLevels)[16], int kBytes>
struct LevelBlock : BlockCodec<32, kBytes> {
  struct Block {
    Levels16<kLevels> levels;
    const uint8_t* qs;
  };
  template <int kVector>
  static MM_INLINE F get(const Block& b, int) {
    return b.levels.template get<kVector>(b.qs);
  }
};

// Codes of a nibble, decoded by what has a value for each.
template <class Table, int kBytes>
struct NibbleBlock : BlockCodec<32, kBytes> {
  struct Block {
    Table table;
    const uint8_t* qs;
  };
  template <int kVector>
  static MM_INLINE F get(const Block& b, int) {
    return b.table(nibbles<kVector>(b.qs));
  }
};

// d * (code - 8)
struct Q4_0 : NibbleBlock<Centred16, 18> {
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {Centred16(half(b)), b + 2};
  }
};

// d * level[code]
struct IQ4_NL : LevelBlock<kIQ4Levels, 18> {
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {Levels16<kIQ4Levels>(half(b)), b + 2};
  }
};

// 2^(e - 127) * value[code]
struct MXFP4 : LevelBlock<kFP4Doubled, 17> {
  static MM_INLINE float half_scale(uint32_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    return load_as<float>(&bits);
  }
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {Levels16<kFP4Doubled>(set1(half_scale(b[0]))), b + 1};
  }
};

// d * code + m
struct Q4_1 : NibbleBlock<Linear16, 20> {
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {Linear16(half(b), half(b + 2)), b + 4};
  }
};

// Five-bit codes, a nibble and one bit of the 32-bit word qh, less kOffset.
template <int kVector, uint8_t kOffset>
MM_INLINE F fives(const uint8_t* qs, uint32_t qh) {
#if defined(__AVX512F__)
  const I code = (nibbles<kVector>(qs) & 15) | select_bits(qh >> (kVector * kWidth), 16);
  return to_float(code - kOffset);
#else
  return floats<kVector>((nibble_bytes(qs) | spread_bits<16>(qh)) - kOffset);
#endif
}

// d * (code - 16)
struct Q5_0 : BlockCodec<32, 22> {
  struct Block {
    F d;
    uint32_t qh;
    const uint8_t* qs;
  };
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {half(b), load_as<uint32_t>(b + 2), b + 6};
  }
  template <int kVector>
  static MM_INLINE F get(const Block& b, int) {
    return fives<kVector, 16>(b.qs, b.qh) * b.d;
  }
};

// d * code + m
struct Q5_1 : BlockCodec<32, 24> {
  struct Block {
    F d, m;
    uint32_t qh;
    const uint8_t* qs;
  };
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {half(b), half(b + 2), load_as<uint32_t>(b + 4), b + 8};
  }
  template <int kVector>
  static MM_INLINE F get(const Block& b, int) {
    return fma(fives<kVector, 0>(b.qs, b.qh), b.d, b.m);
  }
};

// A scale, and codes behind it.
template <int kValues, int kBytes>
struct ScaledCodes : BlockCodec<kValues, kBytes> {
  struct Block {
    F d;
    const uint8_t* qs;
  };
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    const uint8_t* b = BlockCodec<kValues, kBytes>::at(row, block);
    k = {half(b), b + 2};
  }
};

// d * code
struct Q8_0 : ScaledCodes<32, 34> {
  template <int kVector>
  static MM_INLINE F get(const Block& b, int) {
    return to_float(load_s8(b.qs + kVector * kWidth)) * b.d;
  }
};

// +d or -d: the bits in the order of the values.
struct Q1_0 : ScaledCodes<128, 18> {
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const uint32_t bits = load_as<uint32_t>(k.qs + 4 * chunk) >> (kVector * kWidth);
    return to_float(select_bits(bits, 2) - 1) * k.d;
  }
};

// d (code - 1): two bits a code, in the order of the values.
struct Q2_0 : ScaledCodes<64, 18> {
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    constexpr int kFirst = kVector * kWidth;  // 16 values in a word
    I shift;
    for (int i = 0; i < kWidth; ++i) shift[i] = 2 * (kFirst % 16 + i);
    const I word = I{} + load_as<int32_t>(k.qs + 8 * chunk + kFirst / 16 * 4);
    return to_float((word >> shift & 3) - 1) * k.d;
  }
};

}  // namespace metalmm::cpu::MM_ISA
