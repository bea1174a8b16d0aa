// Formats that are planes rather than blocks: affine codes | scales | biases, and dense values.
// The contract is in block.h; a block here is one chunk of 32 values.
#pragma once

#include "block.h"

namespace metalmm::cpu::MM_ISA {

// Codes [kWidth kVector, + kWidth) of a chunk of a little-endian stream of kBits-bit codes, as
// integers whose low kBits bits are the code; what lies above is undefined. The loads reach at most
// 6 bytes beyond the chunk, where the scales and the padding of the row are.
template <int kBits, int kVector>
MM_INLINE I stream_codes(const uint8_t* chunk) {
  constexpr int kFirstBit = kVector * kWidth * kBits % 8, kBitsInAll = kFirstBit + kWidth * kBits;
  const uint8_t* p = chunk + kVector * kWidth * kBits / 8;
  if constexpr (kBitsInAll <= 32) {
    I shift;
    for (int i = 0; i < kWidth; ++i) shift[i] = kFirstBit + i * kBits;
    return (I{} + load_as<int32_t>(p)) >> shift;
  }
#if defined(__AVX2__)
  // Each lane takes the two bytes that its code touches, then shifts.
  static_assert(kFirstBit == 0);
  struct alignas(64) Pick {
    uint8_t byte[4 * kWidth];
    int32_t shift[kWidth];
  };
  static constexpr Pick kPick = [] {
    Pick t{};
    for (int lane = 0; lane < kWidth; ++lane) {
      const int bit = lane * kBits;
      for (int b = 0; b < 4; ++b) {
        t.byte[4 * lane + b] = static_cast<uint8_t>(b < 2 ? bit / 8 + b : 0x80);
      }
      t.shift[lane] = bit % 8;
    }
    return t;
  }();
#if defined(__AVX512F__)
  const __m512i source = kBits <= 4 ? _mm512_set1_epi64(load_as<int64_t>(p))
                                    : _mm512_broadcast_i32x4(load_as<__m128i>(p));
  const __m512i bytes = _mm512_shuffle_epi8(source, load_as<__m512i>(kPick.byte));
  return reinterpret_cast<I>(_mm512_srlv_epi32(bytes, load_as<__m512i>(kPick.shift)));
#else
  const __m256i source = _mm256_set1_epi64x(load_as<int64_t>(p));
  const __m256i bytes = _mm256_shuffle_epi8(source, load_as<__m256i>(kPick.byte));
  return reinterpret_cast<I>(_mm256_srlv_epi32(bytes, load_as<__m256i>(kPick.shift)));
#endif
#endif
}

struct AffineRow {
  const uint8_t *codes, *scales, *biases;
  int group_shift;  // log2 of the chunks that share a scale
  DType type;
};

// scale * code + bias
template <int kBits>
struct Affine {
  static constexpr int kTailValueBytes = 0;
  static constexpr int kBlockValues = kChunkValues;
  static constexpr int kBlockBytes = kChunkValues * kBits / 8;
  static constexpr int kMask = (1 << kBits) - 1;
  using Row = AffineRow;
  struct Block {
    F scale, bias;
    F table;  // scale * code + bias by the low 4 bits of a lane; codes of up to 4 bits with AVX-512
    const uint8_t* codes;
  };
#if defined(__AVX512F__)
  static constexpr bool kTable = kBits <= 4;
#else
  static constexpr bool kTable = false;
#endif

  static MM_INLINE Row row(const uint8_t* p, const RowLayout& l) {
    return {p, p + l.scales_offset, p + l.biases_offset, l.group_shift, l.scale_type};
  }
  static MM_INLINE F parameter(const uint8_t* plane, int64_t group, DType type) {
    if (type == DType::kF16) return half(plane + 2 * group);
    if (type == DType::kBF16) return set1(bf16_to_float(plane + 2 * group));
    return set1(load_as<float>(plane + 4 * group));
  }
  static MM_INLINE void open(const Row& row, int64_t chunk, Block& k) {
    k.codes = row.codes + chunk * kBlockBytes;
    const int64_t group = chunk >> row.group_shift;
    if (group << row.group_shift != chunk) return;
    k.scale = parameter(row.scales, group, row.type);
    k.bias = parameter(row.biases, group, row.type);
    if constexpr (kTable) {
      F code;
      for (int i = 0; i < kWidth; ++i) code[i] = static_cast<float>(i & kMask);
      k.table = code * k.scale + k.bias;
    }
  }
  template <int kVector>
  static MM_INLINE F get(const Block& k, int) {
    if constexpr (kBits == 8) {
      return to_float(load_u8(k.codes + kVector * kWidth)) * k.scale + k.bias;
    } else {
      const I codes = stream_codes<kBits, kVector>(k.codes);
#if defined(__AVX512F__)
      if constexpr (kTable) return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), k.table);
#endif
      return to_float(codes & kMask) * k.scale + k.bias;
    }
  }
};
#define MM_AFFINE(name, Struct, bits, ...) using Struct = Affine<bits>;
#include "metal/formats.def"

// Values as they are. A row need not be a whole number of chunks: the kernels copy its tail.
template <int kValueBytes, F (*kLoad)(const uint8_t*)>
struct Dense : BlockCodec<kChunkValues, kChunkValues * kValueBytes> {
  static constexpr int kTailValueBytes = kValueBytes;
  using Block = const uint8_t*;
  static MM_INLINE void open(const uint8_t* row, int64_t chunk, Block& k) {
    k = Dense::at(row, chunk);
  }
  template <int kVector>
  static MM_INLINE F get(const Block& p, int) {
    return kLoad(p + kVector * kWidth * kValueBytes);
  }
};
MM_INLINE F load_f32(const uint8_t* p) { return load_as<F>(p); }
using F32 = Dense<4, load_f32>;
using F16 = Dense<2, load_f16>;
using BF16 = Dense<2, load_bf16>;

}  // namespace metalmm::cpu::MM_ISA
