// The int8 kernels of one instruction set. Compiled once per set; MM_ISA names it.
#include "codecs_block.h"
#include "codecs_plane.h"
#include "gemv.h"
#include "pack.h"

namespace metalmm::cpu::MM_ISA {

using int8::Decoded;
using int8::Kind;
using int8::Layout;

// Of codecs that no header here has there are no integer codes.
#define MM_BLOCK(name, Struct, ...) struct Struct;
#include "metal/formats.def"

template <class Codec>
void decode_codes(const Weight& w, int64_t n, int64_t first, int64_t last, const Decoded& out) {
  using Codes = Integers<Codec>;
  constexpr int kGroups = Codec::kBlockValues / Codes::kKind.sub;
  const uint8_t* p = w.row(n);
  if (first == 0) fetch_planes<Codec>(w, p);
  const auto row = Codec::row(p, w.layout);
  typename Codes::Block open;
  const Stream<Codec> stream(w);
  uint8_t* codes = out.codes;
  float *scale = out.scale, *min = out.min;
  for (int64_t b = first / Codec::kBlockValues; b < last / Codec::kBlockValues; ++b) {
    stream.fetch(p, b, Codec::kBlockBytes, kPrefetchBytes);
    Codes::open(row, b, open);
#pragma GCC unroll 8
    for (int c = 0; c < Codec::kBlockValues / kChunkValues; ++c, codes += kChunkValues) {
      const Bytes v = Codes::codes(open, c);
      std::memcpy(codes, &v, sizeof v);
    }
    std::memcpy(scale, Codes::scales(open), kGroups * sizeof(float));
    scale += kGroups;
    if constexpr (Codes::kKind.min) {
      std::memcpy(min, Codes::mins(open), kGroups * sizeof(float));
      min += kGroups;
    }
  }
}

// A tile of c: kRows rows of W by kPanels panels of x, of kSpan values of each row in a vector.
// Owner: one thread. Traffic: per kSpan values of K, kPanels loads of x and kRows broadcasts of w.
// Needs: W decoded, in the first-level cache or the second.
template <int kBytes, int kSpan, int kSub, bool kMin, CodeRange kRange, int kRows, int kPanels>
struct Int8Tile {
  using V = Floats<kBytes>;
  static constexpr Layout kLayout{kBytes, kSpan};
  static constexpr int kVectors = kChunkValues / kSpan, kAddends = kLayout.addends(kSub);
  static constexpr int kPerAddend = kVectors / kAddends, kLanes = kBytes / 4;
  static constexpr int64_t kChunkBytes = kLayout.chunk_bytes(kSub);
  static_assert(kSub >= kSpan, "a vector has one scale of W");

  static MM_INLINE void multiply(const int8::TileArgs& t, int64_t chunk, int a,
                                 V (&y)[kRows][kPanels]) {
    const uint8_t* x = t.x + chunk * kChunkBytes;
    const uint8_t* added = x + (kVectors + 1 + a) * kBytes;
    Ints<kBytes> sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) {
        sum[r][p] = kMin || kRange == CodeRange::kLess128
                        ? Ints<kBytes>{}
                        : load_as<Ints<kBytes>>(added + p * t.panel_stride);
      }
    }
#pragma GCC unroll 8
    for (int v = a * kPerAddend; v < (a + 1) * kPerAddend; ++v) {
      Ints<kBytes> codes[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        codes[p] = load_as<Ints<kBytes>>(x + p * t.panel_stride + v * kBytes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const auto w = repeated<kBytes, kSpan>(t.w.row(r).codes + chunk * kChunkValues + v * kSpan);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[r][p] = dot<kRange>(sum[r][p], w, codes[p]);
      }
    }
    V scale[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      scale[p] = load_as<V>(x + p * t.panel_stride + kVectors * kBytes);
    }
    const int64_t group = chunk * (kChunkValues / kSub) + a;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const V d = every<kBytes>(t.w.row(r).scale[group]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        y[r][p] = fma(__builtin_convertvector(sum[r][p], V) * scale[p], d, y[r][p]);
      }
      if constexpr (kMin) {
        const V m = every<kBytes>(t.w.row(r).min[group]);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          y[r][p] = fma(load_as<V>(added + p * t.panel_stride), m, y[r][p]);
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
#if defined(__AVX512F__)
constexpr int kGemvRows = 4, kNarrowRows = 6;
constexpr int kBatchedRows[] = {6}, kGemmRows[] = {12, 6};
#elif defined(__AVX2__)
constexpr int kGemvRows = 2, kNarrowRows = 4;
constexpr int kBatchedRows[] = {4, 2}, kGemmRows[] = {4, 2};
#elif !defined(MM_NEON)  // not to be fast, but to compile soon
constexpr int kGemvRows = 1, kNarrowRows = 1;
constexpr int kBatchedRows[] = {1}, kGemmRows[] = {1};
#else
constexpr int kGemvRows = 4, kNarrowRows = 4;
constexpr int kBatchedRows[] = {4, 4, 2, 2}, kGemmRows[] = {4, 4};
#endif
constexpr int kBatchedPanels = sizeof kBatchedRows / sizeof *kBatchedRows;
// Rows of W of a gemv for m rows of x.
constexpr int gemv_rows(int m) { return m == 1 || kGemvRows < 2 ? kGemvRows : 2; }
constexpr int kGemmPanels = sizeof kGemmRows / sizeof *kGemmRows;
static_assert(kBatchedPanels <= int8::kMaxPanels && kGemmPanels <= int8::kMaxPanels);

template <int kSub, bool kMin, bool kWide, int... b, int... g>
constexpr int8::KindKernels kind_kernels(Indices<b...>, Indices<g...>) {
  constexpr CodeRange range = range_of(kWide, kMin);
  constexpr int n = kVectorBytes;
  using int8::kBatchedSpan, int8::kGemmSpan;
  return {{round_row<kSub, kMin, 1>, round_row<kSub, kMin, 2>},
          {pack<kGemvBytes, kBatchedSpan, kSub, kMin, 1>,
           pack<kGemvBytes, kBatchedSpan, kSub, kMin, 2>},
          {pack<n, kBatchedSpan, kSub, kMin, 1>, pack<n, kBatchedSpan, kSub, kMin, 2>},
          {pack<n, kGemmSpan, kSub, kMin, 1>, pack<n, kGemmSpan, kSub, kMin, 2>},
          {Int8Tile<kGemvBytes, kBatchedSpan, kSub, kMin, range, kNarrowRows, 1>::run, kNarrowRows},
          {{Int8Tile<n, kBatchedSpan, kSub, kMin, range, kBatchedRows[b], b + 1>::run,
            kBatchedRows[b]}...},
          {{Int8Tile<n, kGemmSpan, kSub, kMin, range, kGemmRows[g], g + 1>::run, kGemmRows[g]}...}};
}
// By Kind::index().
template <int index>
constexpr int8::KindKernels kind_kernels() {
  return kind_kernels<index & 1 ? 16 : 32, (index & 2) != 0, (index & 4) != 0>(
      UpTo<kBatchedPanels>::type{}, UpTo<kGemmPanels>::type{});
}

template <class Codec, int kParts, int kM>
constexpr int8::GemvKernel kGemv = Int8Gemv<Codec, gemv_rows(kM), kParts, kM>::run;

template <class Codec>
constexpr int8::CodecKernels codec_kernels() {
  if constexpr (Integers<Codec>::kKind.sub == 0) {
    return {};
  } else {
    return {Integers<Codec>::kKind,
            {{kGemv<Codec, 1, 1>, kGemv<Codec, 1, 2>, kGemv<Codec, 1, 3>, kGemv<Codec, 1, 4>},
             {kGemv<Codec, 2, 1>, kGemv<Codec, 2, 2>}},
            decode_codes<Codec>};
  }
}

template <int... i>
constexpr int8::Kernels int8_kernels(Indices<i...>) {
  return {{kGemvBytes, int8::kBatchedSpan},
          {kVectorBytes, int8::kBatchedSpan},
          {kVectorBytes, int8::kGemmSpan},
          kBatchedPanels,
          kGemmPanels,
          {kind_kernels<i>()...},
          {
#define MM_FORMAT(name, Struct) codec_kernels<Struct>(),
#include "metal/formats.def"
          }};
}

extern const int8::Kernels kInt8Kernels;
const int8::Kernels kInt8Kernels = int8_kernels(UpTo<int8::kNumKinds>::type{});

}  // namespace metalmm::cpu::MM_ISA
