// The dot kernels of AVX2 and NEON for formats with integer codes: included by isa.cpp.
//
// The codes of a chunk are put together as bytes, as the int8 kernels have them, and a byte shuffle
// widens kWidth of them. The sum of codes times x is scaled, not each weight; a minimum multiplies
// sums of x, which are made once per call. q4_0 with AVX2 takes 17 operations for 32 weights, 26 by
// get(). Rejected (Zen 5, one thread, W in the cache, ns for 32 weights of q4_0; get() 1.73): bytes
// stored and widened by loads 1.9, codes as subnormal f16 1.5. Sums of x that take away the offset
// of a code 1.15, but then an outlier of x errs by the offset where its weight is zero.
#pragma once

#include "cpu/dot.h"
#include "cpu/int8/codes.h"

#if (defined(__AVX2__) && !defined(__AVX512F__)) || defined(MM_NEON)
#define MM_BYTE_STEPS

namespace metalmm::cpu::MM_ISA {

// The value of a chunk in a lane of the vector v: the shuffle moves bytes within 16.
constexpr int chunk_value(int v, int lane) { return lane / 4 * 16 + 4 * v + lane % 4; }

// Where the bytes of vector v % 4 come from: to the lowest byte of a lane, or, with a sign, to the
// highest, which multiplies by 2^24; x is arranged divided by it. An x below 2^-102 loses bits, and
// sums of 32 products of an x above 2^115 and codes, which come before the scale, may overflow.
constexpr float kSignedScale = 0x1p-24f;
struct Spread {
  alignas(4 * kWidth) uint8_t byte[4][4 * kWidth];
};
template <bool kSigned>
constexpr Spread kSpread = [] {
  Spread t{};
  for (int v = 0; v < 4; ++v) {
    for (int i = 0; i < 4 * kWidth; ++i) {
      t.byte[v][i] = static_cast<uint8_t>(i % 4 == 3 * kSigned ? chunk_value(v, i / 4 % 4) : 0x80);
    }
  }
  return t;
}();

// Vector v of codes.
template <bool kSigned>
MM_INLINE F spread(Bytes codes, int v) {
  const uint8_t* from = kSpread<kSigned>.byte[v % 4];
#if defined(__AVX2__)
  return to_float(reinterpret_cast<I>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(codes), load_as<__m256i>(from))));
#else
  uint8_t bytes[kChunkValues];
  std::memcpy(bytes, &codes, sizeof bytes);
  return to_float(reinterpret_cast<I>(vqtbl1q_u8(vld1q_u8(bytes + v / 4 * 16), vld1q_u8(from))));
#endif
}

// Formats with scales in a plane have them in f32, too, where fma would round once what the
// specification rounds twice; and in two operations affine4_g64 takes 572 us, by get() 549.
template <class Codec>
constexpr bool kHasByteSteps = Integers<Codec>::kKind.sub > 0 && !Codec::kHasPlanes;

template <class Codec>
struct ByteSteps {
  using Codes = Integers<Codec>;
  static constexpr int8::Kind kKind = Codes::kKind;
  static constexpr bool kSigned = !kKind.min;
  static constexpr int kChunks = Codec::kBlockValues / kChunkValues;
  static constexpr int kGroups = Codec::kBlockValues / kKind.sub;
  // Sums of a chunk: one, where its groups are in different lanes.
  static constexpr int kSums = kKind.sub == 16 && kWidth == 4 ? 2 : 1;
  // Where a block is one group with a minimum, weights are scaled, not sums: one operation more, no
  // register for sums. q4_1, 4096 x 4096, M = 4: 0.76 ms, by sums 1.11.
  static constexpr bool kOneGroup = kKind.min && kGroups == 1;
  // Vectors of sums of x that minima multiply, a lane a group.
  static constexpr int kMins = kKind.min ? kGroups / kWidth : 0;
  static constexpr int kFloats = Codec::kBlockValues + kMins * kWidth;

  static MM_INLINE Bytes codes(const typename Codes::Block& block, int c) {
    const Bytes v = Codes::codes(block, c);
    return kSigned ? v - static_cast<uint8_t>(kKind.offset) : v;
  }
  // The scale of sum i of chunk c.
  static MM_INLINE F scale(const typename Codes::Block& block, int c, int i) {
    const float* scales = Codes::scales(block) + c * kGroups / kChunks + i;
#if defined(__AVX2__)
    if constexpr (kKind.sub == 16) {
      return _mm256_set_m128(_mm_broadcast_ss(scales + 1), _mm_broadcast_ss(scales));
    }
#endif
    return set1(*scales);
  }
};

// Rows of W per pass for m rows of x.
constexpr int byte_rows(int m) { return m == 1 ? 4 : m == 2 ? 3 : 2; }

// Owner: one thread; kRows rows of W at a time against all kM rows of x.
// Traffic: as Dot has it.
// Needs: x arranged by arrange_bytes().
template <class Codec, int kRows, int kM>
struct ByteDot {
  using S = ByteSteps<Codec>;
  using Codes = typename S::Codes;
  using Block = typename Codes::Block;

  // Chunk c of a block, which begins at x.
  static MM_INLINE void multiply(const Block& block, int c, const float* x, F (&acc)[kM]) {
    constexpr int kOfSum = kVectors / S::kSums;
    const Bytes codes = S::codes(block, c);
    if constexpr (S::kOneGroup) {
      const F scale = set1(*Codes::scales(block)), min = set1(*Codes::mins(block));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F w = fma(spread<false>(codes, v), scale, min);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) acc[m] = fma(w, load(x + (v * kM + m) * kWidth), acc[m]);
      }
      return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < S::kSums; ++i) {
      F sums[kM];
#pragma GCC unroll 8
      for (int v = 0; v < kOfSum; ++v) {
        const F w = spread<S::kSigned>(codes, i * kOfSum + v);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
          const F from = load(x + ((c * kVectors + i * kOfSum + v) * kM + m) * kWidth);
          sums[m] = v == 0 ? w * from : fma(w, from, sums[m]);
        }
      }
      const F scale = S::scale(block, c, i);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) acc[m] = fma(sums[m], scale, acc[m]);
    }
  }

  static MM_INLINE void multiply_block(const Block& block, const float* x, F (&acc)[kM]) {
#pragma GCC unroll 8
    for (int c = 0; c < S::kChunks; ++c) {
      multiply(block, c, x, acc);
      in_order(x, acc[0]);
    }
    const float* sums = x + Codec::kBlockValues * kM;
    if constexpr (S::kMins > 0) {
#pragma GCC unroll 4
      for (int i = 0; i < S::kMins; ++i) {
        const F min = load(Codes::mins(block) + i * kWidth);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) acc[m] = fma(load(sums + (i * kM + m) * kWidth), min, acc[m]);
      }
    }
  }

  static MM_INLINE void multiply_rows(const DotArgs& a, const uint8_t* const* p,
                                      F (&acc)[kRows][kM]) {
    typename Codec::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Codec::row(p[r], a.weight.layout);
    Block open[kRows];
    const Stream<Codec> stream(a.weight);
    for (int64_t b = 0; b < a.weight.k / Codec::kBlockValues; ++b) {
      const float* x = a.x + b * S::kFloats * kM;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        stream.fetch(p[r], b, Codec::kBlockBytes, kPrefetchBytes);
        Codes::open(row[r], b, open[r]);
        if (S::kGroups > 1) in_memory(open[r]);
        multiply_block(open[r], x, acc[r]);
        in_order(x, acc[r][0]);
        // x is read again for each row of W: kept in registers for two, it takes those of sums.
        if (kM > 1 && S::kMins > 0) asm volatile("" : : : "memory");
      }
    }
  }

  static void run(const DotArgs& a) { run_passes<Codec, ByteDot, F[kM], kRows, kM>(a); }
};

// x of m rows, of which `rows` are stored, as ByteDot takes it.
template <class Codec>
void arrange_bytes(const ArrangeArgs& a) {
  using S = ByteSteps<Codec>;
  float* out = a.out;
  for (int64_t k = 0; k + Codec::kBlockValues <= a.k; k += Codec::kBlockValues) {
    for (int64_t r = 0; r < a.rows; ++r) {
      const auto put = [&](int vector, F values) {
        store(out + (vector * a.rows + r) * kWidth, values);
      };
      float x[Codec::kBlockValues] = {}, sums[(S::kMins + 1) * kWidth] = {};
      if (r < a.m) std::memcpy(x, a.x + r * a.x_stride + k, sizeof x);
      for (int v = 0; v < S::kChunks * kVectors; ++v) {
        F values;
        for (int lane = 0; lane < kWidth; lane += 4) {
          const int at = v / kVectors * kChunkValues + chunk_value(v % kVectors, lane);
          std::memcpy(reinterpret_cast<float*>(&values) + lane, x + at, 16);
        }
        put(v, S::kSigned ? values * set1(kSignedScale) : values);
      }
      for (int i = 0; S::kMins > 0 && i < Codec::kBlockValues; i += kWidth) {
        sums[i / S::kKind.sub] += sum(load(x + i));
      }
      for (int i = 0; i < S::kMins; ++i) put(S::kChunks * kVectors + i, load(sums + i * kWidth));
    }
    out += S::kFloats * a.rows;
  }
}

}  // namespace metalmm::cpu::MM_ISA

#endif
