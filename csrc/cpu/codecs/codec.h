// A codec decodes the rows of a format to f32 vectors. Layouts: metal/formats.def; bytes as in a
// GGUF file. It is a struct of static functions:
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

struct ByteCodes;  // bytes.h

template <int kValues, int kBytes>
struct BlockCodec {
  static constexpr int kTailValueBytes = 0;  // non-zero where a row may end within a chunk
  static constexpr int kBlockValues = kValues;
  static constexpr int kBlockBytes = kBytes;
  static constexpr bool kHasPlanes = false;  // codes, scales and biases of a row lie apart
  static constexpr bool kIsOfBytes = false;  // whether ByteCodes has the kernels
  template <class Row>
  static constexpr int block_bytes(const Row&) {
    return kBytes;
  }
  using Row = const uint8_t*;
  static MM_INLINE Row row(const uint8_t* p, const RowLayout&) { return p; }
  static MM_INLINE const uint8_t* at(Row row, int64_t block) { return row + block * kBytes; }
};

#if defined(__AVX512F__)
// scale * values[code]: a table of 16 values, scaled once, then one permute per vector.
struct Table16 {
  F entries;
  Table16() = default;
  MM_INLINE Table16(const float* values, F scale) : entries(load(values) * scale) {}
  // The permute reads the low four bits of each lane only.
  MM_INLINE F operator()(I code) const {
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), entries);
  }
};
#endif

// scale * (code - 8) for 4-bit codes. Where a table of 16 takes two permutes and a choice (AVX2),
// or is read value by value, arithmetic is faster: the products of a token of q4_0, AVX2, 6.75 ms
// by it and 9.87 by a table.
#if defined(__AVX512F__)
struct Centred16 : Table16 {
  static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  Centred16() = default;
  MM_INLINE explicit Centred16(F scale) : Table16(kValues, scale) {}
};
#else
struct Centred16 {
  F scale;
  Centred16() = default;
  MM_INLINE explicit Centred16(F s) : scale(s) {}
  MM_INLINE F operator()(I code) const { return to_float((code & 15) - 8) * scale; }
};
#endif

// scale * code + offset for 4-bit codes. The product is exact, so fma rounds as the specification
// does.
struct Linear16 {
  Linear16() = default;
#if defined(__AVX512F__)
  F entries;
  MM_INLINE Linear16(F scale, F offset) {
    const F code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    entries = fma(code, scale, offset);
  }
  MM_INLINE F operator()(I code) const {
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), entries);
  }
#else
  F scale, offset;
  MM_INLINE Linear16(F s, F o) : scale(s), offset(o) {}
  MM_INLINE F operator()(I code) const { return fma(to_float(code & 15), scale, offset); }
#endif
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

}  // namespace metalmm::cpu::MM_ISA
