// Activations rounded to int8 or int16, as torch_metalmm/formats/activations.py specifies: the same
// codes and scales on every instruction set.
#pragma once

#include "vectors.h"

namespace metalmm::cpu::MM_ISA {

using int8::kBase;

// The largest code of so many parts.
template <int kParts>
constexpr float kTopCode = kParts == 1 ? 127 : 127 * (kBase + 1);

MM_INLINE void store_codes(I v, int8_t* out) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v));
  std::memcpy(out, &bytes, sizeof bytes);
#elif defined(__AVX2__)
  const __m256i a = reinterpret_cast<__m256i>(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storeu_si64(out, _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < kWidth; ++i) out[i] = static_cast<int8_t>(v[i]);
#endif
}

MM_INLINE int32_t largest(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(v));
#else
  int32_t top = v[0];
  for (int i = 1; i < kWidth; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// The codes of a block, kParts planes of them; returns its scale.
template <int kParts>
MM_INLINE float round_block(const float* x, int8_t* codes) {
  constexpr float kTop = kTopCode<kParts>;
  // Below this a scale would be subnormal: such blocks are zeros.
  constexpr float kSmallestTop = kTop * 0x1p-126f;
  constexpr int kVectors = kChunkValues / kWidth;
  F v[kVectors];
  I top = {};
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load(x + i * kWidth);
    const I magnitude = reinterpret_cast<I>(v[i]) & 0x7fffffff;  // in the order of the numbers
    top = magnitude > top ? magnitude : top;
  }
  constexpr int32_t kInfinity = 0x7f800000;
  const int32_t top_bits = largest(top);
  const float top_value = load_as<float>(&top_bits);
  if (top_bits >= kInfinity || top_value < kSmallestTop) {
    std::memset(codes, 0, kParts * kChunkValues);
    return top_bits >= kInfinity ? __builtin_nanf("") : 0.f;
  }
  // The sum has no bits below 1: it is rounded to an integer, ties to even.
  const F reciprocal = set1(kTop / top_value), rounder = set1(0x1.8p23f);
  const auto integer = [&](F f) {
    return reinterpret_cast<I>(f + rounder) - reinterpret_cast<I>(rounder);
  };
  for (int i = 0; i < kVectors; ++i) {
    const F scaled = v[i] * reciprocal;
    if constexpr (kParts == 1) {
      store_codes(integer(scaled), codes + i * kWidth);
    } else {
      // No multiple of 1 / kBase, which is odd, is a tie: the f32 quotient finds the nearest.
      const F whole = scaled + rounder - rounder;
      const I high = integer(whole * set1(1.f / kBase));
      store_codes(high, codes + i * kWidth);
      store_codes(integer(whole) - high * kBase, codes + kChunkValues + i * kWidth);
    }
  }
  return top_value / kTop;
}

// Sums of the codes in fours.
struct Fours {
  int32_t sum[kChunkValues / 4];
  MM_INLINE explicit Fours(const int8_t* codes) {
#if defined(__AVX2__)
    const Ints<32> ones = reinterpret_cast<Ints<32>>(_mm256_set1_epi8(1));
    const Ints<32> sums = dot<CodeRange::kPlain>(Ints<32>{}, ones, load_as<Ints<32>>(codes));
    std::memcpy(sum, &sums, sizeof sum);
#else
    for (int i = 0; i < kChunkValues / 4; ++i) {
      sum[i] = codes[4 * i] + codes[4 * i + 1] + codes[4 * i + 2] + codes[4 * i + 3];
    }
#endif
  }
};

// Codes of one row and chunk into their places of a panel (kernels.h); the scale, and what the
// kernels add for each group: -offset sum q as an integer, or s sum q where W has minima.
template <int kBytes, int kSpan, int kSub, bool kMin>
MM_INLINE void place(const int8_t* codes, float scale, int offset, int row, uint8_t* out) {
  constexpr int kLanes = kSpan / 4, kVectors = kChunkValues / kSpan;
  constexpr int kAddends = int8::Layout{kBytes, kSpan}.addends(kSub);
  constexpr int kPerAddend = kVectors / kAddends;
  const Fours fours(codes);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    std::memcpy(out + v * kBytes + row * kSpan, codes + v * kSpan, kSpan);
  }
  uint8_t* scales = out + kVectors * kBytes + row * kSpan;
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; ++i) std::memcpy(scales + 4 * i, &scale, 4);
#pragma GCC unroll 2
  for (int a = 0; a < kAddends; ++a) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) {
      int32_t sum = 0;
#pragma GCC unroll 8
      for (int v = a * kPerAddend; v < (a + 1) * kPerAddend; ++v) {
        sum += fours.sum[v * kLanes + i];
      }
      uint8_t* to = scales + (1 + a) * kBytes + 4 * i;
      const int32_t taken = -offset * sum;
      const float added = static_cast<float>(sum) * scale;
      std::memcpy(to, kMin ? static_cast<const void*>(&added) : &taken, 4);
    }
  }
}

// Each part of a row of x is a row of the panel; the first has kBase times the scale.
template <int kBytes, int kSpan, int kSub, bool kMin, int kParts>
void pack(const int8::PackArgs& a) {
  constexpr int64_t kChunkBytes = int8::Layout{kBytes, kSpan}.chunk_bytes(kSub);
  for (int64_t c = a.first_chunk; c < a.last_chunk; ++c) {
    uint8_t* out = a.out + c * kChunkBytes;
    if (a.rows * kParts < kBytes / kSpan) std::memset(out, 0, kChunkBytes);
    for (int row = 0; row < a.rows; ++row) {
      int8_t codes[kParts * kChunkValues];
      const float scale = round_block<kParts>(a.x + row * a.x_stride + c * kChunkValues, codes);
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        place<kBytes, kSpan, kSub, kMin>(codes + p * kChunkValues,
                                         p == kParts - 1 ? scale : scale * kBase, a.offset,
                                         row * kParts + p, out);
      }
    }
  }
}

// A row of x for gemv.
template <int kSub, bool kMin, int kParts>
void round_row(const float* x, int64_t first_chunk, int64_t last_chunk, int offset,
               const int8::RoundedRow& out) {
  constexpr int kGroups = kChunkValues / kSub, kFours = kSub / 4;
  constexpr int kLanes = kGemvBytes / 4;
  constexpr int kSums = kSub * 4 > kGemvBytes * 4 ? kLanes : kChunkValues / 4;  // sums of a chunk
  for (int64_t c = first_chunk; c < last_chunk; ++c) {
    int8_t* codes = out.codes + c * kParts * kChunkValues;
    const float scale = round_block<kParts>(x + c * kChunkValues, codes);
    for (int g = 0; g < kGroups; ++g) out.scale[c * kGroups + g] = scale;
    Fours fours(codes);
    if constexpr (kParts == 2) {
      const Fours low(codes + kChunkValues);
      for (int i = 0; i < kChunkValues / 4; ++i) fours.sum[i] = fours.sum[i] * kBase + low.sum[i];
    }
    if (kMin) {
      for (int g = 0; g < kGroups; ++g) {
        int32_t sum = 0;
        for (int i = 0; i < kFours; ++i) sum += fours.sum[g * kFours + i];
        const float added = static_cast<float>(sum) * scale;
        std::memcpy(out.added + 4 * (c * kGroups + g), &added, 4);
      }
    } else {
      for (int i = 0; i < kSums; ++i) {
        int32_t sum = fours.sum[i];
        if (kSums < kChunkValues / 4) sum += fours.sum[kSums + i];
        const int32_t taken = -offset * sum;
        std::memcpy(out.added + 4 * (c * kSums + i), &taken, 4);
      }
    }
  }
}

}  // namespace metalmm::cpu::MM_ISA
