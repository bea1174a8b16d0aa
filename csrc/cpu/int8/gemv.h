// Products of a few rows of x, rounded to int8 or int16.
#pragma once

#include <type_traits>

#include "codecs_pairs.h"
#include "cpu/passes.h"

namespace metalmm::cpu::MM_ISA {

// What a row of W gives with kM rows of x, chunk by chunk. Traffic: kParts + 1 bytes a value of x.
template <class Codec, int kParts, int kM>
class ChunkSum {
  using Codes = Integers<Codec>;
  using Block = typename Codes::Block;
  using V = Floats<kGemvBytes>;
  static constexpr int8::Kind kKind = Codes::kKind;
  static constexpr int kVectors = kChunkValues / kGemvBytes, kLanes = kGemvBytes / 4;
  static constexpr CodeRange kRange = range_of(kKind.wide, kKind.min);
  static_assert(kRange != CodeRange::kLess128 || kKind.offset == 128);
  static constexpr int kGroups = Codec::kBlockValues / kKind.sub;
  static constexpr int kChunks = Codec::kBlockValues / kChunkValues;
  // Sums of a chunk, one or two vectors.
  static constexpr int kSums = kChunkValues / (kKind.sub > kGemvBytes ? kKind.sub : kGemvBytes);

 public:
  // Block b of the row.
  MM_INLINE void add(const Block& block, const int8::RoundedRow* x, int64_t b) {
    float scales[kM][kGroups];
    const int8_t* q[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      scale(block, x[m], b, scales[m]);
      add_mins(block, x[m], b, m);
      q[m] = x[m].codes + b * kChunks * kParts * kChunkValues;
    }
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Bytes codes = Codes::codes(block, c);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        multiply(codes, scales[m], c, q[m], x[m], b * kChunks + c, lanes_[m]);
        q[m] += kParts * kChunkValues;
        if (kChunks > 1) in_order(q[m], lanes_[m]);
      }
    }
  }

  MM_INLINE float total(int m) const { return sum(lanes_[m]) + mins_[m]; }

 private:
  // The scales of the block's groups, those of W times those of x.
  static MM_INLINE void scale(const Block& block, const int8::RoundedRow& x, int64_t b,
                              float (&scales)[kGroups]) {
    if constexpr (kGroups == 1) {
      scales[0] = *Codes::scales(block) * x.scale[b];
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; i += kLanes) {
        const V both = load_as<V>(Codes::scales(block) + i) * load_as<V>(x.scale + b * kGroups + i);
        std::memcpy(scales + i, &both, sizeof both);
      }
      if (kKind.sub >= kGemvBytes) in_memory(scales);
    }
  }

  MM_INLINE void add_mins(const Block& block, const int8::RoundedRow& x, int64_t b, int m) {
    if constexpr (kKind.min) {
      const uint8_t* added = x.added + 4 * b * kGroups;
      if constexpr (kGroups == 1) {
        mins_[m] = fma(load_as<float>(added), *Codes::mins(block), mins_[m]);
      } else {
#pragma GCC unroll 4
        for (int i = 0; i < kGroups; i += kLanes) {
          const V of_x = load_as<V>(added + 4 * i);
          lanes_[m] = fma(of_x, load_as<V>(Codes::mins(block) + i), lanes_[m]);
        }
      }
    }
  }

  // The numbers of chunk c, sum i: where a vector holds two groups, each in its lanes.
  static MM_INLINE V of_groups(const float* numbers, int c, int i) {
#if defined(__AVX2__)
    if constexpr (kKind.sub < kGemvBytes) {
      __m256i pick = _mm256_add_epi32(_mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0),
                                      _mm256_set1_epi32(2 * (c % 4)));
      asm("" : "+v"(pick));  // a constant that gcc sees becomes two permutations
      return _mm256_permutevar8x32_ps(load_as<V>(numbers + c / 4 * 8), pick);
    }
#else
    static_assert(kKind.sub >= kGemvBytes);
#endif
    return every<kGemvBytes>(numbers[c * kSums + i]);
  }

  static MM_INLINE void multiply(Bytes codes, const float* scales, int c, const int8_t* codes_of_x,
                                 const int8::RoundedRow& x, int64_t chunk, V& lanes) {
#pragma GCC unroll 2
    for (int i = 0; i < kSums; ++i) {
      Ints<kGemvBytes> sum = {}, high = {};
      if (!kKind.min && kRange != CodeRange::kLess128) {
        sum = load_as<Ints<kGemvBytes>>(x.added + (chunk * kSums + i) * kGemvBytes);
      }
#pragma GCC unroll 2
      for (int v = i * kVectors / kSums; v < (i + 1) * kVectors / kSums; ++v) {
        const int8_t* q = codes_of_x + v * kGemvBytes;
        const auto w = part<kGemvBytes>(codes, v);
        if (kParts == 2) high = dot<kRange>(high, w, load_as<Ints<kGemvBytes>>(q));
        q += (kParts - 1) * kChunkValues;
        sum = dot<kRange>(sum, w, load_as<Ints<kGemvBytes>>(q));
      }
      static_assert(int8::kBase == (1 << 8) - 1, "shifts, where vectors multiply slowly");
      if (kParts == 2) sum += (high << 8) - high;
      lanes = fma(__builtin_convertvector(sum, V), of_groups(scales, c, i), lanes);
    }
  }

  V lanes_[kM] = {};
  float mins_[kM] = {};  // sums of minima where a block is one group
};

#if defined(__AVX512F__)
// Products of a row of W with kM rows of int8 x, two chunks at a time. Traffic: 2 bytes a value of
// x.
template <class Codec, int kM>
class PairSum {
  using Codes = Integers<Codec>;
  using Block = typename Codes::Block;
  static constexpr int8::Kind kKind = Codes::kKind;
  static constexpr int kGroups = Codec::kBlockValues / kKind.sub;
  using V = Floats<4 * kGroups>;  // a number of each group

 public:
  // Block b of the row.
  MM_INLINE void add(const Block& block, const int8::RoundedRow* x, int64_t b) {
    __m512 scales[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      scales[m] = wide(load_as<V>(Codes::scales(block)) * load_as<V>(x[m].scale + b * kGroups));
      if constexpr (kKind.min) {
        const V added = load_as<V>(x[m].added + 4 * b * kGroups);
        mins_[m] = fma(added, load_as<V>(Codes::mins(block)), mins_[m]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; c += 2) {
      const int64_t at = (b * kChunks + c) * kChunkValues;
      const auto w = reinterpret_cast<Ints<64>>(Pairs<Codec>::codes(block, c));
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        Ints<64> sum = {};
        if constexpr (!kKind.min) sum = load_as<Ints<64>>(x[m].added + at);
        sum = dot<CodeRange::kPlain>(sum, w, load_as<Ints<64>>(x[m].codes + at));
        const __m512 of_groups = _mm512_permutexvar_ps(groups_of(c), scales[m]);
        lanes_[m] = fma(__builtin_convertvector(sum, Floats<64>),
                        reinterpret_cast<Floats<64>>(of_groups), lanes_[m]);
      }
    }
  }

  MM_INLINE float total(int m) const {
    __m512 all = reinterpret_cast<__m512>(lanes_[m]);
    if constexpr (kGroups == 16) all = _mm512_add_ps(all, wide(mins_[m]));
    auto half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    if constexpr (kGroups == 8) half = _mm256_add_ps(half, reinterpret_cast<__m256>(mins_[m]));
    return sum(reinterpret_cast<Floats<32>>(half));
  }

 private:
  static constexpr int kChunks = Codec::kBlockValues / kChunkValues;
  // With anything behind the numbers of eight groups.
  static MM_INLINE __m512 wide(V v) {
    if constexpr (kGroups == 16) {
      return reinterpret_cast<__m512>(v);
    } else {
      return _mm512_castps256_ps512(reinterpret_cast<__m256>(v));
    }
  }
  // The group of each lane, which has four values, from chunk c on.
  static MM_INLINE __m512i groups_of(int c) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i group = _mm512_srli_epi32(lane, kKind.sub == 32 ? 3 : 2);
    return _mm512_add_epi32(group, _mm512_set1_epi32(c * kChunkValues / kKind.sub));
  }

  Floats<64> lanes_[kM] = {};
  V mins_[kM] = {};
};
#endif

template <class Sum>
MM_INLINE float total(const Sum& sums, int m) {
  return sums.total(m);
}

// Owner: one thread; kRows rows of W at a time, a kRows-th of the range apart (cpu/dot.h says why).
// Traffic: W once, decoded into registers; kM rows of x, kParts + 1 bytes a value, once per row of
// W.
template <class Codec, int kRows, int kParts, int kM>
struct Int8Gemv {
  using Codes = Integers<Codec>;
#if defined(__AVX512F__)
  using Sum = std::conditional_t<kParts == 1 && Codec::kBlockValues == 256, PairSum<Codec, kM>,
                                 ChunkSum<Codec, kParts, kM>>;
#else
  using Sum = ChunkSum<Codec, kParts, kM>;
#endif

  static MM_INLINE void multiply_rows(const int8::GemvArgs& g, const uint8_t* const* p,
                                      Sum (&y)[kRows]) {
    const int64_t blocks = g.weight.k / Codec::kBlockValues;
    typename Codec::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Codec::row(p[r], g.weight.layout);
    typename Codes::Block open[kRows];
    const Stream<Codec> stream(g.weight);
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        stream.fetch(p[r], b, Codec::kBlockBytes, kPrefetchBytes);
        Codes::open(row[r], b, open[r]);
        y[r].add(open[r], g.x, b);
      }
    }
  }

  static void run(const int8::GemvArgs& g) { run_passes<Codec, Int8Gemv, Sum, kRows, kM>(g); }
};

}  // namespace metalmm::cpu::MM_ISA
