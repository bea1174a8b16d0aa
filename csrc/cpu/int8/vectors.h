// Vectors of bytes, and their products, in the namespace of the instruction set (cpu/simd.h).
#pragma once

#include "cpu/int8/kernels.h"
#include "cpu/simd.h"

namespace metalmm::cpu::MM_ISA {

constexpr int kVectorBytes = 4 * kWidth;
// A vector of gemv has one row of x and one chunk: a longer one would hold two scales of W.
constexpr int kGemvBytes = kVectorBytes < kChunkValues ? kVectorBytes : kChunkValues;

// Whether products of unsigned codes above 127 take more instructions.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kWideCosts = false;
#else
constexpr bool kWideCosts = true;
#endif

// The codes of W that a product is of.
enum class CodeRange {
  kPlain,   // codes as the instruction takes them: at most 127, with VNNI all
  kWide,    // all codes
  kLess128  // all codes, 128 taken from each
};
// Wide codes without a minimum have an offset of 128. Where they cost, products of codes less 128
// need no sums of x: NEON, q8_0, 14 instructions for 32 weights, 17 with sums.
constexpr CodeRange range_of(bool wide, bool min) {
  if (!wide || !kWideCosts) return CodeRange::kPlain;
  return min ? CodeRange::kWide : CodeRange::kLess128;
}

#if defined(__AVX2__)
MM_INLINE __m256i m256(Ints<32> v) { return reinterpret_cast<__m256i>(v); }
#endif

// acc + in each lane the products of its four bytes: w unsigned, x signed and not -128.
template <CodeRange kRange>
MM_INLINE Ints<16> dot(Ints<16> acc, Ints<16> w, Ints<16> x) {
#if defined(MM_NEON)
  int8x16_t a = reinterpret_cast<int8x16_t>(w), b = reinterpret_cast<int8x16_t>(x);
  int32x4_t sum = reinterpret_cast<int32x4_t>(acc);
  if (kRange != CodeRange::kPlain) a = veorq_s8(a, vdupq_n_s8(-128));  // w - 128
#if defined(__ARM_FEATURE_DOTPROD)
  if (kRange == CodeRange::kWide)
    sum = vdotq_s32(vdotq_s32(sum, vdupq_n_s8(64), b), vdupq_n_s8(64), b);
  sum = vdotq_s32(sum, a, b);
#else
  // Pairs of products: at most 2 * 128 * 127 < 2^15.
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  sum = vpadalq_s16(sum, vpaddq_s16(low, high));
  if (kRange == CodeRange::kWide) {
    sum = vpadalq_s16(sum, vpaddq_s16(vshll_n_s8(vget_low_s8(b), 7), vshll_high_n_s8(b, 7)));
  }
#endif
  return reinterpret_cast<Ints<16>>(sum);
#else
  uint8_t a[16];
  int8_t b[16];
  std::memcpy(a, &w, sizeof a);
  std::memcpy(b, &x, sizeof b);
  constexpr int kLess = kRange == CodeRange::kLess128 ? 128 : 0;
  for (int i = 0; i < 16; ++i) acc[i / 4] += (a[i] - kLess) * b[i];
  return acc;
#endif
}

#if defined(__AVX2__)
template <CodeRange kRange>
MM_INLINE Ints<32> dot(Ints<32> acc, Ints<32> w, Ints<32> x) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints<32>>(_mm256_dpbusd_epi32(m256(acc), m256(w), m256(x)));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<Ints<32>>(_mm256_dpbusd_avx_epi32(m256(acc), m256(w), m256(x)));
#else
  // maddubs saturates pairs beyond 2^15: 2 * 127 * 127 is not, and neither is 2 * 128 * 127, of |w
  // - 128| and of the 128 x that are added.
  const __m256i ones = _mm256_set1_epi16(1);
  const auto with_sums = [&](Ints<32> to, __m256i pairs) {
    return to + reinterpret_cast<Ints<32>>(_mm256_madd_epi16(pairs, ones));
  };
  if constexpr (kRange == CodeRange::kPlain) {
    return with_sums(acc, _mm256_maddubs_epi16(m256(w), m256(x)));
  } else {
    const __m256i top = _mm256_set1_epi8(-128), less = _mm256_xor_si256(m256(w), top);
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(m256(x), less));
    if (kRange == CodeRange::kWide) acc = with_sums(acc, _mm256_maddubs_epi16(top, m256(x)));
    return with_sums(acc, pairs);
  }
#endif
}
#endif

#if defined(__AVX512VNNI__)
template <CodeRange kRange>
MM_INLINE Ints<64> dot(Ints<64> acc, Ints<64> w, Ints<64> x) {
  return reinterpret_cast<Ints<64>>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(x)));
}
#endif

// A number in every lane; v - 0 is v.
template <int kBytes>
MM_INLINE Floats<kBytes> every(float v) {
  return v - Floats<kBytes>{};
}

// kSpan bytes, over and over.
template <int kBytes, int kSpan>
MM_INLINE Ints<kBytes> repeated(const uint8_t* p) {
  if constexpr (kSpan == kBytes) {
    return load_as<Ints<kBytes>>(p);
  } else if constexpr (kSpan == 4) {
    return load_as<int32_t>(p) + Ints<kBytes>{};
  } else {
    static_assert(kSpan == 8);
    return reinterpret_cast<Ints<kBytes>>(load_as<int64_t>(p) + typename Vec<kBytes>::Longs{});
  }
}

// Half i of 32 bytes, or the whole.
template <int kBytes>
MM_INLINE Ints<kBytes> part(Bytes v, int i) {
  if constexpr (kBytes == sizeof v) {
    return reinterpret_cast<Ints<kBytes>>(v);
  } else {
    uint8_t bytes[sizeof v];
    std::memcpy(bytes, &v, sizeof bytes);
    return load_as<Ints<kBytes>>(bytes + i * kBytes);
  }
}

}  // namespace metalmm::cpu::MM_ISA
