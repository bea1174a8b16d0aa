// GGML blocks of 256 values as integer codes. The contract is in codes.h; the scales are
// those of the codecs of f32.
#pragma once

#include "codes.h"
#include "cpu/codecs/k.h"

namespace metalmm::cpu::MM_ISA {

// A codec whose Block has the scales and minima of its groups as f32.
template <class Codec, int sub, bool has_min, int offset, bool wide = false>
struct Grouped {
  static constexpr int8::Kind kKind{sub, has_min, wide, offset};
  using Block = GroupScales;
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    Codec::open(row, block, k);
  }
  static MM_INLINE const float* scales(const Block& k) { return k.scale; }
};

// Bits `mask` of every byte after a shift to the left, or to the right where it is negative. Words
// are shifted, whose bits beyond their byte the mask takes away: bytes would be masked twice.
MM_INLINE Bytes field(Bytes v, int left, uint8_t mask) {
#if defined(MM_NEON)
  return (left > 0 ? v << left : v >> -left) & mask;
#else
  typedef uint16_t Words __attribute__((vector_size(sizeof(Bytes))));
  const Words w = reinterpret_cast<Words>(v);
  return reinterpret_cast<Bytes>(left > 0 ? w << left : w >> -left) & mask;
#endif
}

template <>
struct Integers<Q2_K> : Grouped<Q2_K, 16, true, 0> {
  // The codes are moved to the lowest bits here: exact, both factors are powers of two.
  static MM_INLINE void open(const uint8_t* row, int64_t block, Block& k) {
    Q2_K::open(row, block, k);
    for (int i = 0; i < 16; i += kWidth)
      store(k.scale + i, load(k.scale + i) / load(kFieldScale + i));
  }
  static MM_INLINE const float* mins(const Block& k) { return k.offset; }
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    return field(load_bytes(k.b + 16 + chunk / 4 * 32), -2 * (chunk % 4), 3);
  }
};
template <>
struct Integers<Q3_K> : Grouped<Q3_K, 16, false, 4> {
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    return field(load_bytes(k.b + 32 + chunk / 4 * 32), -2 * (chunk % 4), 3) |
           field(load_bytes(k.b), 2 - chunk, 4);
  }
};
// The codec has four scales, four minima, and the other four of each: here the scales come first.
template <class Codec>
struct SixBitIntegers : Grouped<Codec, 32, true, 0> {
  static MM_INLINE void open(const uint8_t* row, int64_t block, GroupScales& k) {
    static_assert(six_bit_scale(4) == 8 && kSixBitOffset == 4);
#if defined(__AVX512F__)
    k.b = row + block * Codec::kBlockBytes;
    const F scales = six_bit_scales(k.b);
    store(k.scale, _mm512_shuffle_f32x4(scales, scales, _MM_SHUFFLE(3, 1, 2, 0)));
#else
    // Moved as bytes: floats moved one by one would not reach the vector loads before their stores.
    k.b = row + block * Codec::kBlockBytes;
    const SixBits six = six_bits(k.b);
    constexpr uint64_t kLow = 0xffffffff;
    const uint64_t sorted[2] = {(six.first & kLow) | six.second << 32,
                                six.first >> 32 | (six.second & ~kLow)};
    uint8_t bytes[sizeof sorted];
    std::memcpy(bytes, sorted, sizeof bytes);
    const F d = half(k.b), minus_dmin = minus_half(k.b + 2);
    for (int i = 0; i < 8; i += kWidth) {
      store(k.scale + i, to_float(load_u8(bytes + i)) * d);
      store(k.scale + 8 + i, to_float(load_u8(bytes + 8 + i)) * minus_dmin);
    }
#endif
  }
  static MM_INLINE const float* mins(const GroupScales& k) { return k.scale + 8; }
};
template <>
struct Integers<Q4_K> : SixBitIntegers<Q4_K> {
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    const Bytes qs = load_bytes(k.b + 16 + chunk / 2 * 32);
    return field(qs, -4 * (chunk % 2), 15);
  }
};
template <>
struct Integers<Q5_K> : SixBitIntegers<Q5_K> {
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    const Bytes qs = load_bytes(k.b + 48 + chunk / 2 * 32);
    return field(qs, -4 * (chunk % 2), 15) | field(load_bytes(k.b + 16), 4 - chunk, 16);
  }
};
template <>
struct Integers<Q6_K> : Grouped<Q6_K, 16, false, 32> {
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    const int half_block = chunk / 4, t = chunk % 4;
    const Bytes ql = load_bytes(k.b + half_block * 64 + t % 2 * 32);
    const Bytes qh = load_bytes(k.b + 128 + half_block * 32);
    return field(ql, -4 * (t / 2), 15) | field(qh, 4 - 2 * t, 0x30);
  }
};
template <>
struct Integers<IQ4_XS> : Grouped<IQ4_XS, 32, false, kIQ4Offset, true> {
  static MM_INLINE Bytes codes(const Block& k, int chunk) {
    return iq4_levels(k.b + 8 + 16 * chunk);
  }
};

}  // namespace metalmm::cpu::MM_ISA
