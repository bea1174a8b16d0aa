// One vector type per instruction set, in a namespace of its own.
//
// A translation unit is compiled once per instruction set with MM_ISA naming it (avx512vbmi,
// avx512, avx2vnni, avx2, neon, scalar). Everything included by it lives in metalmm::cpu::MM_ISA
// and uses no inline function of the standard library: the linker keeps one copy of such a
// function, and it might be the AVX-512 one. MM_SCALAR leaves out NEON, which every aarch64
// compiler has on.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(MM_SCALAR)
#include <arm_neon.h>
#define MM_NEON
#endif

#include "half.h"
#include "kernels.h"

#if defined(__AVX2__) || defined(MM_NEON)
#define MM_INLINE inline __attribute__((always_inline))
#else  // not to be fast, but to compile soon
#define MM_INLINE inline
#endif

namespace metalmm::cpu::MM_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// The indices of a table, so that each of its entries is made, and none stays null.
template <int... i>
struct Indices {};
template <int n, int... i>
struct UpTo : UpTo<n - 1, n - 1, i...> {};
template <int... i>
struct UpTo<0, i...> {
  using type = Indices<i...>;
};

// Compiler vectors: operators work lane by lane; contraction is off, so a * b + c rounds twice.
template <int kBytes>
struct Vec;
#define MM_VEC(n)                                          \
  template <>                                              \
  struct Vec<n> {                                          \
    typedef int32_t Ints __attribute__((vector_size(n)));  \
    typedef float Floats __attribute__((vector_size(n)));  \
    typedef int64_t Longs __attribute__((vector_size(n))); \
  };
MM_VEC(16)
MM_VEC(32)
MM_VEC(64)
#undef MM_VEC
template <int kBytes>
using Ints = typename Vec<kBytes>::Ints;
template <int kBytes>
using Floats = typename Vec<kBytes>::Floats;
using F = Floats<4 * kWidth>;
using I = Ints<4 * kWidth>;
typedef uint8_t U8 __attribute__((vector_size(kWidth)));
typedef int8_t S8 __attribute__((vector_size(kWidth)));
typedef uint16_t U16 __attribute__((vector_size(2 * kWidth)));

template <class T>
MM_INLINE T load_as(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

MM_INLINE F load(const float* p) { return load_as<F>(p); }
MM_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
// v - 0 is v; v + 0 would make +0 of -0.
MM_INLINE F set1(float v) { return v - F{}; }
MM_INLINE F to_float(I v) { return __builtin_convertvector(v, F); }

// kWidth bytes as integers. gcc 12 takes __builtin_convertvector of bytes apart lane by lane: 4x
// slower GEMV.
MM_INLINE I load_u8(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(_mm512_cvtepu8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<I>(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(load_as<U8>(p), I);
#endif
}
MM_INLINE U16 load_u8_as_u16(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<U16>(_mm256_cvtepu8_epi16(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<U16>(_mm_cvtepu8_epi16(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(load_as<U8>(p), U16);
#endif
}
MM_INLINE I load_s8(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<I>(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(load_as<S8>(p), I);
#endif
}

// a * b + c with one rounding where the machine has it.
MM_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(MM_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
MM_INLINE Floats<16> fma(Floats<16> a, Floats<16> b, Floats<16> c) {
#if defined(__FMA__)
  return _mm_fmadd_ps(a, b, c);
#elif defined(MM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
#if defined(__AVX2__)
MM_INLINE Floats<32> fma(Floats<32> a, Floats<32> b, Floats<32> c) {
  return _mm256_fmadd_ps(a, b, c);
}
#endif
#if defined(__AVX512F__)
MM_INLINE Floats<64> fma(Floats<64> a, Floats<64> b, Floats<64> c) {
  return _mm512_fmadd_ps(a, b, c);
}
#endif

// The codes of a chunk in a byte each, put together before they are widened. An operation on them
// costs a quarter of one on the same codes as integers.
typedef uint8_t Bytes __attribute__((vector_size(kChunkValues)));
MM_INLINE Bytes load_bytes(const uint8_t* p) { return load_as<Bytes>(p); }

#if defined(MM_NEON)
MM_INLINE Bytes bytes_of(uint8x16_t first, uint8x16_t second) {
  const uint8x16_t both[] = {first, second};
  return load_as<Bytes>(both);
}
#endif

// kValue in the bytes whose bit of the word is set (byte i, bit i), 0 elsewhere.
template <uint8_t kValue>
MM_INLINE Bytes spread_bits(uint32_t word) {
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  return reinterpret_cast<Bytes>(_mm256_maskz_set1_epi8(word, static_cast<char>(kValue)));
#elif defined(__AVX2__)
  const __m256i source = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(word)),
      _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return reinterpret_cast<Bytes>(_mm256_cmpeq_epi8(_mm256_and_si256(source, bit), bit)) & kValue;
#elif defined(MM_NEON)
  const uint8x16_t source = vreinterpretq_u8_u32(vdupq_n_u32(word));
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  const auto sixteen = [&](uint8_t i) {
    const uint8x8_t low = vdup_n_u8(i), high = vdup_n_u8(i + 1);
    return vtstq_u8(vqtbl1q_u8(source, vcombine_u8(low, high)), bit) & kValue;
  };
  return bytes_of(sixteen(0), sixteen(2));
#else
  uint8_t bits[kChunkValues];
  for (int i = 0; i < kChunkValues; ++i) bits[i] = static_cast<uint8_t>((word >> i & 1) * kValue);
  return load_bytes(bits);
#endif
}

// table[code] of codes below 16.
MM_INLINE Bytes look_up(const uint8_t* table, Bytes codes) {
#if defined(__AVX2__)
  const __m256i both = _mm256_broadcastsi128_si256(load_as<__m128i>(table));
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(both, reinterpret_cast<__m256i>(codes)));
#else
  uint8_t bytes[kChunkValues];
  std::memcpy(bytes, &codes, sizeof bytes);
#if defined(MM_NEON)
  const uint8x16_t levels = vld1q_u8(table);
  for (int i = 0; i < kChunkValues; i += 16) {
    vst1q_u8(bytes + i, vqtbl1q_u8(levels, vld1q_u8(bytes + i)));
  }
#else
  for (uint8_t& b : bytes) b = table[b];
#endif
  return load_bytes(bytes);
#endif
}

// values[i] + offset, as bytes.
struct ByteTable {
  alignas(16) uint8_t entry[16];
};
constexpr ByteTable byte_table(const float* values, int offset) {
  ByteTable out{};
  for (int i = 0; i < 16; ++i) {
    out.entry[i] = static_cast<uint8_t>(static_cast<int>(values[i]) + offset);
  }
  return out;
}
// Bytes [kWidth kVector, + kWidth), signed.
template <int kVector>
MM_INLINE F floats(Bytes v) {
#if defined(__AVX512F__)
  const __m256i b = reinterpret_cast<__m256i>(v);
  return to_float(reinterpret_cast<I>(
      _mm512_cvtepi8_epi32(kVector ? _mm256_extracti128_si256(b, 1) : _mm256_castsi256_si128(b))));
#elif defined(__AVX2__)
  const __m256i b = reinterpret_cast<__m256i>(v);
  const __m128i half = kVector < 2 ? _mm256_castsi256_si128(b) : _mm256_extracti128_si256(b, 1);
  return to_float(
      reinterpret_cast<I>(_mm256_cvtepi8_epi32(kVector % 2 ? _mm_srli_si128(half, 8) : half)));
#else
  uint8_t bytes[sizeof v];
  std::memcpy(bytes, &v, sizeof bytes);
#if defined(MM_NEON)
  // To the highest bytes of the lanes, from where the conversion takes them.
  constexpr uint8_t k = kVector % 4 * kWidth;
  const uint8x16_t from = {255, 255, 255, k,     255, 255, 255, k + 1,
                           255, 255, 255, k + 2, 255, 255, 255, k + 3};
  const uint8x16_t high = vqtbl1q_u8(vld1q_u8(bytes + kVector / 4 * 16), from);
  return vcvtq_n_f32_s32(vreinterpretq_s32_u8(high), 24);
#else
  return to_float(load_s8(bytes + kVector * kWidth));
#endif
#endif
}

// Keeps a vector that several instructions use in a register: gcc would load it again for each.
MM_INLINE F in_register(F v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(MM_NEON)
  asm("" : "+w"(v));
#endif
  return v;
}

// Keeps numbers in memory whose loads give every lane one of them: gcc would permute registers for
// each (q6_k, int8: 4.8 cycles for 32 values, Zen 4). Products of NEON take a lane.
template <class T>
MM_INLINE void in_memory([[maybe_unused]] T& numbers) {
#if !defined(MM_NEON)
  asm("" : "+m"(numbers));
#endif
}

// With NEON what is loaded from p is loaded behind what gives v. clang would load a pass's operands
// first and keep them in memory: exact q4_0 takes 52 instructions for 32 weights without, 43 with.
template <class T, class V>
MM_INLINE void in_order([[maybe_unused]] const T*& p, [[maybe_unused]] V& v) {
#if defined(MM_NEON)
  asm("" : "+r"(p), "+w"(v));
#endif
}

// Sum of the lanes, as a tree of halves, in registers: Zen 5, one thread, q4_0 1024 x 1024 in 22.6
// us, 25.7 where the lanes went through memory.
MM_INLINE float sum(Floats<16> v) {
#if defined(__AVX2__)
  const __m128 two = v + _mm_movehl_ps(v, v);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
#elif defined(MM_NEON)
  return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
#else
  const float even = v[0] + v[2], odd = v[1] + v[3];
  return even + odd;
#endif
}
#if defined(__AVX2__)
MM_INLINE float sum(Floats<32> v) {
  return sum(_mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1));
}
#endif
#if defined(__AVX512F__)
MM_INLINE float sum(Floats<64> v) {
  return sum(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1));
}
#endif

MM_INLINE float half_to_float(const uint8_t* p) {
#if defined(__F16C__)
  return _cvtsh_ss(load_as<uint16_t>(p));
#elif defined(MM_NEON)
  return load_as<__fp16>(p);
#else
  return half_bits_to_float(load_as<uint16_t>(p));
#endif
}

// An f16 in every lane.
MM_INLINE F half(const uint8_t* p) {
#if defined(__AVX512F__)
  // A load that broadcasts, in place of a conversion on the ports that decode: 5.0 cycles per q4_0
  // block for 5.8.
  return set1(half_table[load_as<uint16_t>(p)]);
#else
  return set1(half_to_float(p));
#endif
}

// The negative of it.
MM_INLINE F minus_half(const uint8_t* p) {
#if defined(__AVX512F__)
  return set1(half_table[load_as<uint16_t>(p) ^ 0x8000]);
#else
  return -half(p);
#endif
}

MM_INLINE float bf16_to_float(const uint8_t* p) {
  const uint32_t bits = static_cast<uint32_t>(load_as<uint16_t>(p)) << 16;
  return load_as<float>(&bits);
}

// kWidth bits of f16.
MM_INLINE F from_halves(U16 bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(bits));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(bits));
#else
  F v;
  uint8_t bytes[sizeof bits];
  std::memcpy(bytes, &bits, sizeof bits);
  for (int i = 0; i < kWidth; ++i) v[i] = half_to_float(bytes + 2 * i);
  return v;
#endif
}

// kWidth consecutive f16 or bf16.
MM_INLINE F load_f16(const uint8_t* p) { return from_halves(load_as<U16>(p)); }
MM_INLINE F load_bf16(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<F>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16));
#elif defined(__AVX2__)
  return reinterpret_cast<F>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(p)), 16));
#else
  return reinterpret_cast<F>(__builtin_convertvector(load_as<U16>(p), I) << 16);
#endif
}

// v as kWidth bf16, rounded to nearest, ties to even; a NaN stays one. In integers: vcvtneps2bf16
// of AVX512-BF16 flushes subnormals, and needs an instruction set more.
MM_INLINE void store_bf16(uint16_t* p, F v) {
  typedef uint32_t U32 __attribute__((vector_size(4 * kWidth)));
  const U32 bits = reinterpret_cast<U32>(v);
  const U32 rounded = bits + 0x7fff + (bits >> 16 & 1);
  const U32 is_nan = reinterpret_cast<U32>((bits & 0x7fffffff) > 0x7f800000);
  const U32 high = ((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16;
#if defined(__AVX512F__)
  const __m256i out = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(high));
#elif defined(__AVX2__)
  const __m256i packed =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(high), reinterpret_cast<__m256i>(high));
  const __m128i out = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  const U16 out = __builtin_convertvector(high, U16);
#endif
  std::memcpy(p, &out, sizeof out);
}

// value in the lanes whose bit of bits is set (lane i, bit i), 0 elsewhere.
MM_INLINE I select_bits(uint32_t bits, int32_t value) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(_mm512_maskz_set1_epi32(static_cast<__mmask16>(bits), value));
#else
  I weight;
  for (int i = 0; i < kWidth; ++i) weight[i] = 1 << i;
  return ((I{} + static_cast<int32_t>(bits)) & weight) != 0 ? I{} + value : I{};
#endif
}

}  // namespace metalmm::cpu::MM_ISA
