// GGML blocks of 256 values: decode to f32 vectors. The contract is in codec.h.
// open() turns the packed scales of a block into f32 once; they stay in the first-level
// cache.
#pragma once

#include "codec.h"

namespace metalmm::cpu::MM_ISA {

// out[i] = scale * bytes[i] for 16 bytes, signed or not.
template <bool kSigned>
MM_INLINE void scale_bytes16(const uint8_t* bytes, F scale, float* out) {
  for (int i = 0; i < 16; i += kWidth) {
    const I v = kSigned ? load_s8(bytes + i) : load_u8(bytes + i);
    store(out + i, to_float(v) * scale);
  }
}

// scale * code + offset, the product exact.
struct GroupScales {
  float scale[16], offset[16];
  const uint8_t* b;
};

// The 2-bit fields of q2_k are masked where they lie, 4^(chunk % 4) too large: the scales of a
// chunk are that much smaller. Both factors are powers of two, so every product keeps its bits.
inline constexpr float kFieldScale[16] = {1,        1,        1 / 4.f,  1 / 4.f, 1 / 16.f, 1 / 16.f,
                                          1 / 64.f, 1 / 64.f, 1,        1,       1 / 4.f,  1 / 4.f,
                                          1 / 16.f, 1 / 16.f, 1 / 64.f, 1 / 64.f};

// (d s) code - (dmin m): 2-bit codes, 4-bit s and m per 16 values.
struct Q2_K : BlockCodec<256, 84> {
  using Block = GroupScales;
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    k.b = at(row, block);
    const F d = half(k.b + 80), dmin = half(k.b + 82);
    for (int i = 0; i < 16; i += kWidth) {
      const I bytes = load_u8(k.b + i);
      store(k.scale + i, to_float(bytes & 15) * d * load(kFieldScale + i));
      store(k.offset + i, -(to_float(bytes >> 4) * dmin));
    }
  }
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    constexpr int kFirst = kVector * kWidth;
    const I bytes = load_u8(k.b + 16 + chunk / 4 * 32 + kFirst);
    const int s = 2 * chunk + kFirst / 16;
    return fma(to_float(bytes & 3 << chunk % 4 * 2), set1(k.scale[s]), set1(k.offset[s]));
  }
};

// Bit `from` of every byte, at bit `to`.
MM_INLINE Bytes bit_to(Bytes v, int from, int to) {
  return (from < to ? v << (to - from) : v >> (from - to)) & static_cast<uint8_t>(1 << to);
}

// (d s) (code - 4): 3-bit codes, the high bit in hmask; 6-bit s - 32 per 16 values.
struct Q3_K : BlockCodec<256, 110> {
  using Block = GroupScales;
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    k.b = at(row, block);
    const uint32_t a = load_as<uint32_t>(k.b + 96), b = load_as<uint32_t>(k.b + 100),
                   high = load_as<uint32_t>(k.b + 104);
    constexpr uint32_t kLow = 0x0f0f0f0f, kTwo = 0x03030303;
    const uint32_t words[4] = {
        (a & kLow) | (high & kTwo) << 4, (b & kLow) | (high >> 2 & kTwo) << 4,
        (a >> 4 & kLow) | (high >> 4 & kTwo) << 4, (b >> 4 & kLow) | (high >> 6 & kTwo) << 4};
    const F d = half(k.b + 108);
#if defined(__AVX512F__)
    const __m128i s = _mm_set_epi32(words[3], words[2], words[1], words[0]);
    store(k.scale, to_float(reinterpret_cast<I>(_mm512_cvtepu8_epi32(s)) - 32) * d);
#else
    uint8_t s[16];
    std::memcpy(s, words, sizeof s);
    for (int i = 0; i < 16; i += kWidth) store(k.scale + i, to_float(load_u8(s + i) - 32) * d);
#endif
  }
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const Bytes low = load_bytes(k.b + 32 + chunk / 4 * 32) >> (chunk % 4 * 2) & 3;
    const Bytes high = bit_to(load_bytes(k.b), chunk, 2);
    return floats<kVector>((low | high) - 4) * set1(k.scale[2 * chunk + kVector * kWidth / 16]);
  }
};

// The 6-bit scales and minima of q4_k and q5_k, as d s and -dmin m: those of chunk c are number
// six_bit_scale(c), and kSixBitOffset more.
constexpr int six_bit_scale(int chunk) { return chunk / 4 * 8 + chunk % 4; }
constexpr int kSixBitOffset = 4;

struct SixBits {
  uint64_t first, second;
};
// The 16 of them, a byte each. In integer registers, whose ports have nothing else to do.
MM_INLINE SixBits six_bits(const uint8_t* b) {
  const uint64_t ab = load_as<uint64_t>(b + 4), c = load_as<uint32_t>(b + 12);
  return {ab & 0x3f3f3f3f3f3f3f3f,
          ((c | c << 28) & 0x0f0f0f0f0f0f0f0f) | (ab >> 2 & 0x3030303030303030)};
}

#if defined(__AVX512F__)
MM_INLINE F six_bit_scales(const uint8_t* b) {
  const SixBits six = six_bits(b);
  const __m128i bytes = _mm_insert_epi64(_mm_cvtsi64_si128(six.first), six.second, 1);
  const I s = reinterpret_cast<I>(_mm512_cvtepu8_epi32(bytes));
  return to_float(s) *
         reinterpret_cast<F>(_mm512_mask_blend_ps(0xf0f0, half(b), minus_half(b + 2)));
}
#endif

MM_INLINE void open_scales_6bit(const uint8_t* b, GroupScales& k) {
  k.b = b;
#if defined(__AVX512F__)
  store(k.scale, six_bit_scales(b));
#else
  const SixBits six = six_bits(b);
  uint8_t bytes[16];
  std::memcpy(bytes, &six, sizeof bytes);
  const float d = half_to_float(b), minus_dmin = -half_to_float(b + 2);
  for (int i = 0; i < 16; i += kWidth) {
    F factor;
    for (int lane = 0; lane < kWidth; ++lane) factor[lane] = (i + lane) / 4 % 2 ? minus_dmin : d;
    store(k.scale + i, to_float(load_u8(bytes + i)) * factor);
  }
#endif
}

template <int kBytes>
struct SixBitScales : BlockCodec<256, kBytes> {
  using Block = GroupScales;
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    open_scales_6bit(SixBitScales::at(row, block), k);
  }
};

// Nibbles of q4_k: 32 bytes hold chunk 2c (low) and 2c + 1 (high).
template <int kVector>
MM_INLINE I nibbles_by_chunk(const uint8_t* qs, int chunk) {
  const I bytes = load_u8(qs + chunk / 2 * 32 + kVector * kWidth);
  return chunk % 2 ? bytes >> 4 : bytes;
}

// (d s) code - (dmin m): 4-bit codes, 6-bit s and m per 32 values.
struct Q4_K : SixBitScales<144> {
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const float* scale = k.scale + six_bit_scale(chunk);
    const Linear16 table(set1(scale[0]), set1(scale[kSixBitOffset]));
    return table(nibbles_by_chunk<kVector>(k.b + 16, chunk));
  }
};

// q4_k with a fifth bit in qh: bit chunk of byte l.
struct Q5_K : SixBitScales<176> {
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const Bytes qs = load_bytes(k.b + 48 + chunk / 2 * 32);
    const Bytes low = chunk % 2 ? qs >> 4 : qs & 15;
    const F code = floats<kVector>(low | bit_to(load_bytes(k.b + 16), chunk, 4));
    const float* scale = k.scale + six_bit_scale(chunk);
    return fma(code, set1(scale[0]), set1(scale[kSixBitOffset]));
  }
};

// (d s) (code - 32): 6-bit codes, int8 s per 16 values.
struct Q6_K : BlockCodec<256, 210> {
  using Block = GroupScales;
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    k.b = at(row, block);
    scale_bytes16<true>(k.b + 192, half(k.b + 208), k.scale);
  }
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const int half_block = chunk / 4, t = chunk % 4;
    const Bytes ql = load_bytes(k.b + half_block * 64 + t % 2 * 32);
    const Bytes qh = load_bytes(k.b + 128 + half_block * 32);
    const Bytes low = t < 2 ? ql & 15 : ql >> 4;
    const Bytes high = (t < 2 ? qh << (4 - 2 * t) : qh >> (2 * t - 4)) & 0x30;
    return floats<kVector>((low | high) - 32) * set1(k.scale[2 * chunk + kVector * kWidth / 16]);
  }
};

// (d (s - 32)) value[code]: nibbles as in the 32-blocks, 6-bit s per 32 values.
struct IQ4_XS : BlockCodec<256, 136> {
  using Block = GroupScales;
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    k.b = at(row, block);
    // Fields of 4 and of 2 bits, moved apart to a byte each by halves.
    uint64_t low = load_as<uint32_t>(k.b + 4), high = load_as<uint16_t>(k.b + 2);
    low = (low | low << 16) & 0x0000ffff0000ffff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
    high = (high | high << 24) & 0x000000ff000000ff;
    high = (high | high << 12) & 0x000f000f000f000f;
    high = (high | high << 6) & 0x0303030303030303;
    // Stored at once: a load of 16 bytes waits for two stores of 8, which made int8 products of
    // AVX-512 take twice their time.
    typedef uint64_t Pair __attribute__((vector_size(16)));
    const Pair codes = {low | high << 4, 0};
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof bytes);
    const F d = half(k.b);
    for (int i = 0; i < 8; i += kWidth) {
      store(k.scale + i, to_float(load_u8(bytes + i) - 32) * d);
    }
  }
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const Levels16<kIQ4Levels> levels(set1(k.scale[chunk]));
    return levels.get<kVector>(k.b + 8 + 16 * chunk);
  }
};

}  // namespace metalmm::cpu::MM_ISA
