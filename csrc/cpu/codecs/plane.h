// Formats that are planes rather than blocks: affine codes | scales | biases, and dense values.
// The contract is in codec.h; a block here is one chunk of 32 values.
#pragma once

#include "codec.h"

namespace metalmm::cpu::MM_ISA {

// A chunk of a little-endian stream of kBits-bit codes, a byte each: every code is taken from the
// two bytes that it touches.
template <int kBits>
MM_INLINE Bytes stream_bytes(const uint8_t* p) {
  if constexpr (kBits == 8) {
    return load_bytes(p);
  } else {
#if defined(__AVX2__) || defined(MM_NEON)
    // Sixteen bytes have those of 16 codes: the second sixteen end with the chunk, or, of 3 bits, 4
    // bytes behind it, where a scale and a bias are. Each word gets the two bytes of its code,
    // whose bits a product moves to the upper byte.
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
#if defined(__AVX2__)
    const __m256i source = _mm256_set_m128i(load_as<__m128i>(p + kSecond), load_as<__m128i>(p));
    const auto eights = [&](int i) {
      const __m256i words = _mm256_shuffle_epi8(source, load_as<__m256i>(kPick.byte[i]));
      return _mm256_srli_epi16(_mm256_mullo_epi16(words, load_as<__m256i>(kPick.factor)), 8);
    };
    const Bytes codes = reinterpret_cast<Bytes>(_mm256_packus_epi16(eights(0), eights(1)));
#else
    const uint16x8_t factor = vld1q_u16(kPick.factor);
    const auto sixteen = [&](const uint8_t* from, int half) {
      const uint8x16_t source = vld1q_u8(from);
      const auto eight = [&](int i) {
        const uint8x16_t words = vqtbl1q_u8(source, vld1q_u8(kPick.byte[i] + 16 * half));
        return vreinterpretq_u8_u16(vmulq_u16(vreinterpretq_u16_u8(words), factor));
      };
      return vuzp2q_u8(eight(0), eight(1));
    };
    const Bytes codes = bytes_of(sixteen(p, 0), sixteen(p + kSecond, 1));
#endif
    return codes & static_cast<uint8_t>((1 << kBits) - 1);
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
#elif defined(MM_NEON)
template <>
MM_INLINE Bytes stream_bytes<4>(const uint8_t* p) {
  const uint8x16_t v = vld1q_u8(p), low = v & 15, high = v >> 4;
  return bytes_of(vzip1q_u8(low, high), vzip2q_u8(low, high));
}
template <>
MM_INLINE Bytes stream_bytes<2>(const uint8_t* p) {
  const uint8x16_t v = vcombine_u8(vld1_u8(p), vdup_n_u8(0)), twice = vzip1q_u8(v, v);
  const int8x16_t right = vreinterpretq_s8_u32(vdupq_n_u32(0xfafcfe00));  // 0, 2, 4, 6 bits
  const uint8x16_t first = vshlq_u8(vzip1q_u8(twice, twice), right);
  const uint8x16_t second = vshlq_u8(vzip2q_u8(twice, twice), right);
  return bytes_of(first, second) & 3;
}
#endif

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
struct Affine : BlockCodec<kChunkValues, kChunkValues * kBits / 8> {
  static constexpr bool kHasPlanes = true;
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
    k.codes = row.codes + chunk * Affine::kBlockBytes;
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
#if defined(MM_NEON)
      return floats<kVector>(stream_bytes<kBits>(k.codes)) * k.scale + k.bias;
#else
      const I codes = stream_codes<kBits, kVector>(k.codes);
#if defined(__AVX512F__)
      if constexpr (kTable) return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), k.table);
#endif
      return to_float(codes & kMask) * k.scale + k.bias;
#endif
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
