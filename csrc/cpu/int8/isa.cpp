// The int8 kernels of one instruction set. Compiled once per set; MM_ISA names it.
#include "codecs_block.h"
#include "codecs_k.h"
#include "codecs_plane.h"
#include "pack.h"

namespace metalmm::cpu::MM_ISA {

using int8::Decoded;
using int8::Kind;
using int8::Layout;

constexpr int kPrefetchBytes = 512;

template <class Codec>
MM_INLINE void prefetch_block(const uint8_t* row, int64_t block) {
  for (int i = 0; i < Codec::kBlockBytes; i += 64) {
    __builtin_prefetch(row + block * Codec::kBlockBytes + i + kPrefetchBytes);
  }
}

// Owner: one thread; kRows rows of W at a time, a kRows-th of the range apart (isa.cpp's Dot says
// why). Traffic: W once, decoded into registers; x, 3 bytes a value, once per kRows rows. Needs: x
// in one panel.
template <class Codec, int kRows>
struct Int8Gemv {
  using Codes = Integers<Codec>;
  using Block = typename Codes::Block;
  using V = Floats<kGemvBytes>;
  static constexpr Kind kKind = Codes::kKind;
  static constexpr int kSpan = kGemvBytes, kVectors = kChunkValues / kSpan;
  static constexpr int kAddends = Layout{kSpan, kSpan}.addends(kKind.sub);
  static constexpr int64_t kChunkBytes = Layout{kSpan, kSpan}.chunk_bytes(kKind.sub);
  static constexpr int kGroups = kChunkValues / kKind.sub;

  // The number of group i of a chunk; where a vector holds two groups, each in its lanes.
  template <class Get>
  static MM_INLINE V of_groups(Get get, int i) {
#if defined(__AVX2__)
    if constexpr (kKind.sub < kSpan) {
      return _mm256_blend_ps(every<kSpan>(get(0)), every<kSpan>(get(1)), 0xf0);
    }
#else
    static_assert(kKind.sub >= kSpan);
#endif
    return every<kSpan>(get(i));
  }

  static MM_INLINE void multiply(const Block& block, int chunk, const uint8_t* x, V& y) {
    const Bytes codes = Codes::codes(block, chunk);
    const V scale = load_as<V>(x + kVectors * kSpan);
#pragma GCC unroll 2
    for (int a = 0; a < kAddends; ++a) {
      const uint8_t* added = x + (kVectors + 1 + a) * kSpan;
      Ints<kSpan> sum = kKind.min ? Ints<kSpan>{} : load_as<Ints<kSpan>>(added);
#pragma GCC unroll 2
      for (int i = a * kVectors / kAddends; i < (a + 1) * kVectors / kAddends; ++i) {
        sum = dot<kKind.wide>(sum, part<kSpan>(codes, i), load_as<Ints<kSpan>>(x + i * kSpan));
      }
      const auto d = [&](int i) { return Codes::scale(block, chunk * kGroups + i); };
      y = fma_of(__builtin_convertvector(sum, V) * scale, of_groups(d, a), y);
      if constexpr (kKind.min) {
        const auto m = [&](int i) { return Codes::min(block, chunk * kGroups + i); };
        y = fma_of(load_as<V>(added), of_groups(m, a), y);
      }
    }
  }

  static MM_INLINE void multiply_rows(const int8::GemvArgs& g, const uint8_t* const* p,
                                      V (&y)[kRows]) {
    const int64_t blocks = g.weight.k / Codec::kBlockValues;
    typename Codec::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Codec::row(p[r], g.weight.layout);
    Block open[kRows];
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        prefetch_block<Codec>(p[r], b);
        Codes::open(row[r], b, open[r]);
      }
      constexpr int kChunks = Codec::kBlockValues / kChunkValues;
#pragma GCC unroll 8
      for (int c = 0; c < kChunks; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          multiply(open[r], c, g.x + (b * kChunks + c) * kChunkBytes, y[r]);
        }
      }
    }
  }

  static void run(const int8::GemvArgs& g) {
    const int64_t n_rows = g.last_row - g.first_row, passes = (n_rows + kRows - 1) / kRows;
    for (int64_t i = 0; i < passes; ++i) {
      const uint8_t* p[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t n = i + r * passes;
        p[r] = g.weight.row(g.first_row + (n < n_rows ? n : n_rows - 1));
      }
      V y[kRows] = {};
      multiply_rows(g, p, y);
      for (int r = 0; r < kRows && i + r * passes < n_rows; ++r) {
        g.y[i + r * passes] = sum_of(y[r]);
      }
    }
  }
};

template <class Codec>
void decode_codes(const Weight& w, int64_t n, int64_t first, int64_t last, const Decoded& out) {
  using Codes = Integers<Codec>;
  constexpr int kGroups = Codec::kBlockValues / Codes::kKind.sub;
  const uint8_t* p = w.row(n);
  const auto row = Codec::row(p, w.layout);
  typename Codes::Block open;
  uint8_t* codes = out.codes;
  float *scale = out.scale, *min = out.min;
  for (int64_t b = first / Codec::kBlockValues; b < last / Codec::kBlockValues; ++b) {
    prefetch_block<Codec>(p, b);
    Codes::open(row, b, open);
#pragma GCC unroll 8
    for (int c = 0; c < Codec::kBlockValues / kChunkValues; ++c, codes += kChunkValues) {
      const Bytes v = Codes::codes(open, c);
      std::memcpy(codes, &v, sizeof v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroups; ++i) {
      *scale++ = Codes::scale(open, i);
      if constexpr (Codes::kKind.min) *min++ = Codes::min(open, i);
    }
  }
}

// A tile of c: kRows rows of W by kPanels panels of x, of kSpan values of each row in a vector.
// Owner: one thread. Traffic: per kSpan values of K, kPanels loads of x and kRows broadcasts of w.
// Needs: W decoded, in the first-level cache or the second.
template <int kSpan, int kSub, bool kMin, bool kWide, int kRows, int kPanels>
struct Int8Tile {
  using V = Floats<kVectorBytes>;
  static constexpr Layout kLayout{kVectorBytes, kSpan};
  static constexpr int kVectors = kChunkValues / kSpan, kAddends = kLayout.addends(kSub);
  static constexpr int kPerAddend = kVectors / kAddends, kLanes = kVectorBytes / 4;
  static constexpr int64_t kChunkBytes = kLayout.chunk_bytes(kSub);
  static_assert(kSub >= kSpan, "a vector has one scale of W");

  static MM_INLINE void multiply(const int8::TileArgs& t, int64_t chunk, int a,
                                 V (&y)[kRows][kPanels]) {
    const uint8_t* x = t.x + chunk * kChunkBytes;
    const uint8_t* added = x + (kVectors + 1 + a) * kVectorBytes;
    Ints<kVectorBytes> sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) {
        sum[r][p] =
            kMin ? Ints<kVectorBytes>{} : load_as<Ints<kVectorBytes>>(added + p * t.panel_stride);
      }
    }
#pragma GCC unroll 8
    for (int v = a * kPerAddend; v < (a + 1) * kPerAddend; ++v) {
      Ints<kVectorBytes> codes[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        codes[p] = load_as<Ints<kVectorBytes>>(x + p * t.panel_stride + v * kVectorBytes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const auto w =
            repeated<kVectorBytes, kSpan>(t.w.row(r).codes + chunk * kChunkValues + v * kSpan);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[r][p] = dot<kWide>(sum[r][p], w, codes[p]);
      }
    }
    V scale[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      scale[p] = load_as<V>(x + p * t.panel_stride + kVectors * kVectorBytes);
    }
    const int64_t group = chunk * (kChunkValues / kSub) + a;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const V d = every<kVectorBytes>(t.w.row(r).scale[group]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        y[r][p] = fma_of(__builtin_convertvector(sum[r][p], V) * scale[p], d, y[r][p]);
      }
      if constexpr (kMin) {
        const V m = every<kVectorBytes>(t.w.row(r).min[group]);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          y[r][p] = fma_of(load_as<V>(added + p * t.panel_stride), m, y[r][p]);
        }
      }
    }
  }

  static void run(const int8::TileArgs& t) {
    V y[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) {
        y[r][p] = t.accumulate ? load_as<V>(t.c + r * t.c_stride + p * kLanes) : V{};
      }
    }
    for (int64_t chunk = 0; chunk < t.chunks; ++chunk) {
#pragma GCC unroll 2
      for (int a = 0; a < kAddends; ++a) multiply(t, chunk, a, y);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) {
        std::memcpy(t.c + r * t.c_stride + p * kLanes, &y[r][p], sizeof(V));
      }
    }
  }
};

// Rows of W of a tile by its panels: their sums, results and operands are in registers, of which
// there are 32, or 16 with AVX2.
constexpr int kBatchedSpan = 16, kGemmSpan = 4;
#if defined(__AVX512F__)
constexpr int kGemvRows = 4;
constexpr int kBatchedRows[] = {4, 4}, kGemmRows[] = {12, 6};
#elif defined(__AVX2__)
constexpr int kGemvRows = 2;
constexpr int kBatchedRows[] = {4, 2, 1, 1}, kGemmRows[] = {4, 2};
#else
constexpr int kGemvRows = 4;
constexpr int kBatchedRows[] = {4, 4, 2, 2}, kGemmRows[] = {4, 4};
#endif
constexpr int kBatchedPanels = sizeof kBatchedRows / sizeof *kBatchedRows;
constexpr int kGemmPanels = sizeof kGemmRows / sizeof *kGemmRows;
static_assert(kBatchedPanels <= int8::kMaxPanels && kGemmPanels <= int8::kMaxPanels);

// As those of isa.cpp.
template <int... i>
struct Numbers {};
template <int n, int... i>
struct NumbersTo : NumbersTo<n - 1, n - 1, i...> {};
template <int... i>
struct NumbersTo<0, i...> {
  using type = Numbers<i...>;
};

template <int kSub, bool kMin, bool kWide, int... b, int... g>
constexpr int8::KindKernels kind_kernels(Numbers<b...>, Numbers<g...>) {
  constexpr bool wide = kWide && kWideCosts;
  constexpr int n = kVectorBytes;
  return {
      pack<kGemvBytes, kGemvBytes, kSub, kMin>,
      pack<n, kBatchedSpan, kSub, kMin>,
      pack<n, kGemmSpan, kSub, kMin>,
      {{Int8Tile<kBatchedSpan, kSub, kMin, wide, kBatchedRows[b], b + 1>::run, kBatchedRows[b]}...},
      {{Int8Tile<kGemmSpan, kSub, kMin, wide, kGemmRows[g], g + 1>::run, kGemmRows[g]}...}};
}
// By Kind::index().
template <int index>
constexpr int8::KindKernels kind_kernels() {
  return kind_kernels<index & 1 ? 16 : 32, (index & 2) != 0, (index & 4) != 0>(
      NumbersTo<kBatchedPanels>::type{}, NumbersTo<kGemmPanels>::type{});
}

template <class Codec>
constexpr int8::CodecKernels codec_kernels() {
  if constexpr (Integers<Codec>::kKind.sub == 0) {
    return {};
  } else {
    return {Integers<Codec>::kKind, Int8Gemv<Codec, kGemvRows>::run, decode_codes<Codec>};
  }
}

template <int... i>
constexpr int8::Kernels int8_kernels(Numbers<i...>) {
  return {{kGemvBytes, kGemvBytes},
          {kVectorBytes, kBatchedSpan},
          {kVectorBytes, kGemmSpan},
          kBatchedPanels,
          kGemmPanels,
          {kind_kernels<i>()...},
          {
#define MM_FORMAT(name, Struct) codec_kernels<Struct>(),
#include "metal/formats.def"
          }};
}

extern const int8::Kernels kInt8Kernels;
const int8::Kernels kInt8Kernels = int8_kernels(NumbersTo<int8::kNumKinds>::type{});

}  // namespace metalmm::cpu::MM_ISA
