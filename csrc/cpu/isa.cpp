// The kernels of one instruction set. Compiled once per set, which MM_ISA names, and once per part
// of the codecs, which MM_PART numbers: the parts of a set are compiled side by side. Without
// MM_PART it is the whole set.
#include "attention/softmax.h"
#include "codecs/block.h"
#include "codecs/bytes.h"
#include "codecs/grid.h"
#include "codecs/k.h"
#include "codecs/plane.h"
#include "dot.h"
#include "kernels.h"
#include "steps/bytes.h"
#include "steps/dot.h"

namespace metalmm::cpu::MM_ISA {

MM_INLINE void store_as(float* p, F v) { store(p, v); }
MM_INLINE void store_as(uint16_t* p, F v) { store_bf16(p, v); }

template <class Codec, int kVector = 0, class T>
MM_INLINE void store_chunk(const typename Codec::Block& open, int chunk, T* out) {
  store_as(out + kVector * kWidth, Codec::template get<kVector>(open, chunk));
  if constexpr (kVector + 1 < kVectors) store_chunk<Codec, kVector + 1>(open, chunk, out);
}

// T: float, or uint16_t for the bits of bf16.
template <class Codec, class T>
void decode(const Weight& w, int64_t n, int64_t first, int64_t last, T* out) {
  const uint8_t* p = w.row(n);
  const auto row = Codec::row(p, w.layout);
  const int64_t end = last / Codec::kBlockValues;
  typename Codec::Block open;
  for (int64_t b = first / Codec::kBlockValues; b < end; ++b) {
    Codec::open(row, b, open);
#pragma GCC unroll 8
    for (int c = 0; c < Codec::kBlockValues / kChunkValues; ++c, out += kChunkValues) {
      store_chunk<Codec>(open, c, out);
    }
  }
  if constexpr (Codec::kTailValueBytes > 0) {
    const int64_t done = end * Codec::kBlockValues;
    const Tail tail(p, done, last, Codec::kTailValueBytes);
    T values[kChunkValues];
    Codec::open(tail.bytes, 0, open);
    store_chunk<Codec>(open, 0, values);
    std::memcpy(out, values, (last - done) * sizeof(T));
  }
}

#if defined(__AVX2__) || defined(MM_NEON)
template <class Codec, int kM>
constexpr DotKernel kDot = Dot<Codec, dot_rows<Codec>(kM), kM>::run;
#else
// Not to be fast, but to compile soon: one product for all codecs, of values decoded to memory.
template <int kM>
void add_products(const float* w, int64_t n, const float* x, F (&acc)[kM]) {
  for (int64_t k = 0; k < n; k += kWidth, x += kM * kWidth) {
    for (int m = 0; m < kM; ++m) acc[m] = fma(load(w + k), load(x + m * kWidth), acc[m]);
  }
}

template <class Codec, int kM>
void dot_decoded(const DotArgs& a) {
  constexpr int kValues = 256;
  static_assert(kValues % Codec::kBlockValues == 0);
  for (int64_t n = a.first_row; n < a.last_row; ++n) {
    F acc[kM] = {};
    for (int64_t k = 0; k < a.weight.k; k += kValues) {
      const int64_t last = k + kValues < a.weight.k ? k + kValues : a.weight.k;
      float w[kValues] = {};
      decode<Codec>(a.weight, n, k, last, w);
      add_products(w, last - k, a.x + k * kM, acc);
    }
    for (int m = 0; m < kM; ++m) a.y[m * a.y_stride + n - a.first_row] = sum(acc[m]);
  }
}
template <class Codec, int kM>
constexpr DotKernel kDot = dot_decoded<Codec, kM>;
#endif

// A tile of c: kTileRows rows of W by kPanels panels of kWidth rows of x.
// Owner: one thread. Traffic: per k, kPanels loads of x and kTileRows broadcasts of w.
// Needs: w decoded, x transposed into panels, both in the second-level cache.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kPanelsPerTile = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kPanelsPerTile = 2;
#else
constexpr int kTileRows = 6, kPanelsPerTile = 4;
#endif

template <int kPanels>
void tile(const TileArgs& a) {
  F acc[kTileRows][kPanels];
  for (int r = 0; r < kTileRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      acc[r][p] = a.accumulate ? load(a.c + r * a.c_stride + p * kWidth) : F{};
    }
  }
  for (int64_t k = 0; k < a.k; ++k) {
    F v[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) v[p] = load(a.x + p * a.x_stride + k * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kTileRows; ++r) {
      const F w = set1(a.w[r * kDecodeStride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(w, v[p], acc[r][p]);
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int p = 0; p < kPanels; ++p) store(a.c + r * a.c_stride + p * kWidth, acc[r][p]);
  }
}

// The indices of a table, so that each of its entries is made, and none stays null.
template <int... i>
struct Indices {};
template <int n, int... i>
struct UpTo : UpTo<n - 1, n - 1, i...> {};
template <int... i>
struct UpTo<0, i...> {
  using type = Indices<i...>;
};

template <class Codec, int... i>
constexpr StepKernels step_kernels(Indices<i...>) {
#if defined(__AVX512F__)
  if constexpr (Steps<Codec>::kValues > 0) {
    return {Steps<Codec>::kValues,
            kStepFloats<Codec>,
            {StepDot<Codec, step_rows(kDotRows[i]), kDotRows[i]>::run...},
            arrange<Codec>};
  }
#elif defined(MM_BYTE_STEPS)
  if constexpr (kHasByteSteps<Codec>) {
    using S = ByteSteps<Codec>;
    return {Codec::kBlockValues,
            S::kFloats,
            {ByteDot<Codec, byte_rows(kDotRows[i]), kDotRows[i]>::run...},
            arrange_bytes<Codec>};
  }
#endif
  return {};
}

template <class Codec, int... i>
constexpr CodecKernels codec_kernels(Indices<i...>) {
  return {{kDot<Codec, kDotRows[i]>...},
          step_kernels<Codec>(typename UpTo<kNumStepKernels>::type{}),
          decode<Codec, float>,
          decode<Codec, uint16_t>};
}

// The kernels of a codec of this part, else none.
template <class Codec, int part, int of>
constexpr CodecKernels kernels_of_part() {
  if constexpr (part == of) {
    return codec_kernels<Codec>(typename UpTo<kNumDotKernels>::type{});
  } else {
    return {};
  }
}

template <int part>
constexpr IsaPart isa_part() {
  return {{
#define MM_FORMAT(name, Struct) kernels_of_part<Struct, part, part_of(Codec::Struct)>(),
#include "metal/formats.def"
  }};
}

extern const IsaPart kPart0, kPart1, kAffinePart;
#if !defined(MM_PART) || MM_PART == 1
const IsaPart kPart1 = isa_part<1>();
#endif
#if !defined(MM_PART) || MM_PART == 2
const IsaPart kAffinePart = isa_part<kAffine>();
#endif

#if !defined(MM_PART) || MM_PART == 0
const IsaPart kPart0 = isa_part<0>();

template <int... i>
constexpr IsaKernels kernels(const char* name, Indices<i...>) {
  static_assert(kPanelsPerTile <= kMaxPanels);
  return {name,
          kWidth,
          kTileRows,
          kPanelsPerTile,
          {tile<i + 1>...},
          kAttention,
          {&kPart0, &kPart1, &kAffinePart}};
}

#define MM_STRING_(x) #x
#define MM_STRING(x) MM_STRING_(x)

extern const IsaKernels kKernels;
const IsaKernels kKernels = kernels(MM_STRING(MM_ISA), UpTo<kPanelsPerTile>::type{});
#endif

#define MM_BLOCK(name, Struct, values, bytes, ...) \
  static_assert(Struct::kBlockValues == values && Struct::kBlockBytes == bytes, #name);
#include "metal/formats.def"

}  // namespace metalmm::cpu::MM_ISA
