// The kernels of one instruction set. Compiled once per set, which MM_ISA names, and once per part
// of the codecs, which MM_PART numbers: the codecs of the headers that a part includes, so that an
// edit of one compiles no other. Without MM_PART it is the whole set.
#ifdef MM_PART
#define MM_HAS(part) (MM_PART == part)
#else
#define MM_HAS(part) 1
#endif

#if MM_HAS(0)
#include "attention/softmax.h"
#include "codecs/block.h"
#include "int8/codecs_block.h"
#endif
#if MM_HAS(1)
#include "int8/codecs_k.h"
#include "steps/k.h"
#endif
#if MM_HAS(2)
#include "codecs/grid.h"
#endif
#if MM_HAS(3)
#include "steps/affine.h"
#endif
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

// The kernels of all formats of bytes, told which one it is.
template <class Codec>
MM_INLINE Weight of_bytes(Weight w) {
  static constexpr ByteFormat kFormat{Codec::kBlockBytes, Codec::open};
  w.layout.bytes = &kFormat;
  return w;
}
template <class Codec, int kM>
void dot_bytes(const DotArgs& given) {
  DotArgs a = given;
  a.weight = of_bytes<Codec>(given.weight);
  kDot<ByteCodes, kM>(a);
}
template <class Codec, class T>
void decode_bytes(const Weight& w, int64_t n, int64_t first, int64_t last, T* out) {
  decode<ByteCodes>(of_bytes<Codec>(w), n, first, last, out);
}

// Whether the headers of the part have the codec.
#define MM_BLOCK(name, Struct, ...) struct Struct;
#include "metal/formats.def"
template <class Codec, class = void>
constexpr bool kIsHere = false;
template <class Codec>
constexpr bool kIsHere<Codec, decltype(void(sizeof(Codec)))> = true;

template <class Codec, int... i>
constexpr CodecKernels kernels_of(Indices<i...>) {
  if constexpr (!kIsHere<Codec>) {
    return {};
  } else if constexpr (Codec::kIsOfBytes) {
    return {{dot_bytes<Codec, kDotRows[i]>...},
            {},
            decode_bytes<Codec, float>,
            decode_bytes<Codec, uint16_t>};
  } else {
    return {{kDot<Codec, kDotRows[i]>...},
            step_kernels<Codec>(UpTo<kNumStepKernels>::type{}),
            decode<Codec, float>,
            decode<Codec, uint16_t>};
  }
}

#define MM_JOIN_(a, b) a##b
#define MM_JOIN(a, b) MM_JOIN_(a, b)
#ifdef MM_PART
#define MM_PART_NAME MM_JOIN(kPart, MM_PART)
#else
#define MM_PART_NAME kPart0
#endif
#define MM_KERNELS(name, Struct, ...) kernels_of<Struct>(UpTo<kNumDotKernels>::type{}),
#if MM_HAS(3)
#define MM_PLANES MM_KERNELS
#else
#define MM_PLANES(...) CodecKernels{},
#endif

extern const IsaPart MM_PART_NAME;
const IsaPart MM_PART_NAME = {{
#define MM_DENSE MM_PLANES
#define MM_AFFINE MM_PLANES
#define MM_BLOCK MM_KERNELS
#include "metal/formats.def"
}};

#if MM_HAS(0)
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

#ifdef MM_PART
extern const IsaPart kPart1, kPart2, kPart3;
#define MM_PARTS {&kPart0, &kPart1, &kPart2, &kPart3}
#else
#define MM_PARTS {&kPart0}
#endif

template <int... i>
constexpr IsaKernels kernels(const char* name, Indices<i...>) {
  static_assert(kPanelsPerTile <= kMaxPanels);
  return {name, kWidth, kTileRows, kPanelsPerTile, {tile<i + 1>...}, kAttention, MM_PARTS};
}

#define MM_STRING_(x) #x
#define MM_STRING(x) MM_STRING_(x)

extern const IsaKernels kKernels;
const IsaKernels kKernels = kernels(MM_STRING(MM_ISA), UpTo<kPanelsPerTile>::type{});
#endif

#ifndef MM_PART  // of a part not every struct is here
#define MM_BLOCK(name, Struct, values, bytes, ...) \
  static_assert(Struct::kBlockValues == values && Struct::kBlockBytes == bytes, #name);
#include "metal/formats.def"
#endif

}  // namespace metalmm::cpu::MM_ISA
