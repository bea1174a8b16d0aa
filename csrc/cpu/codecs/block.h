// GGML blocks of codes beside one scale: decode to f32 vectors. Layouts: metal/formats.def; bytes
// as in a GGUF file.
//
// A codec is a struct of static functions:
//   kBlockValues, kBlockBytes
//   Row    pointers into one row of W;         Row row(const uint8_t*, const RowLayout&)
//   Block  what is computed once per block;    void open(const Row&, int64_t block, Block&),
//          which may keep what the block before left there
//   F      get<kVector>(block, chunk): kWidth values of the block, from kChunkValues chunk +
//          kWidth kVector
// Every value is rounded as the Python specification rounds it, on every instruction set.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "levels.h"

namespace metalmm::cpu::MM_ISA {

constexpr int kVectors = kChunkValues / kWidth;

// Bytes ahead of a block at which its row is fetched. Zen 5, two threads, cold 4096 x 4096, of
// ggml's time: q4_0 1.07 with 512 bytes, 0.99 with 2048, with int8 activations 1.04 and 0.99.
constexpr int kPrefetchBytes = 2048;

template <int kValues, int kBytes>
struct BlockCodec {
  static constexpr int kTailValueBytes = 0;  // non-zero where a row may end within a chunk
  static constexpr int kBlockValues = kValues;
  static constexpr int kBlockBytes = kBytes;
  using Row = const uint8_t*;
  static MM_INLINE Row row(const uint8_t* p, const RowLayout&) { return p; }
  static MM_INLINE const uint8_t* at(Row row, int64_t block) { return row + block * kBytes; }
};

// Nibble order of the 32-blocks: byte j holds value j (low) and j + 16 (high).
template <int kVector>
MM_INLINE I nibbles(const uint8_t* qs) {
  constexpr int kFirst = kVector * kWidth;
  const I bytes = load_u8(qs + kFirst % 16);
  return kFirst < 16 ? bytes : bytes >> 4;
}

// All 32 nibbles, as bytes.
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

// Twice the FP4 values, so that the scale is halved and 2^128 (e = 255) stays finite, as in gguf.
inline constexpr float kFP4Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// scale * level of codes in the nibble order of the 32-blocks. Where a table of 16 f32 fits no
// register, the table is of bytes: 5 instructions for 8 values with AVX2, and not 9.
template <const float (&kLevels)[16]>
struct Levels16 {
#if defined(__AVX512F__)
  Table16 table;
  Levels16() = default;
  MM_INLINE explicit Levels16(F scale) : table(kLevels, scale) {}
  template <int kVector>
  MM_INLINE F get(const uint8_t* qs) const {
    return table(nibbles<kVector>(qs));
  }
#else
  static constexpr ByteTable kTable = byte_table(kLevels, 0);
  F scale;
  Levels16() = default;
  MM_INLINE explicit Levels16(F s) : scale(s) {}
  template <int kVector>
  MM_INLINE F get(const uint8_t* qs) const {
    return floats<kVector>(look_up(kTable.entry, nibble_bytes(qs))) * scale;
  }
#endif
};
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
