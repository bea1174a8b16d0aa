// The kernels of one instruction set. Compiled once per set; MM_ISA names it.
#include "attention/softmax.h"
#include "codecs/block.h"
#include "codecs/bytes.h"
#include "codecs/grid.h"
#include "codecs/k.h"
#include "codecs/plane.h"
#include "kernels.h"

namespace metalmm::cpu::MM_ISA {

// Rows of W per pass for m rows of x: rows * m accumulators and the decoded weights live in
// registers, of which there are 32 (AVX-512, NEON) or 16. More rows share each load of x and give
// memory more streams; decoding a block of 256 takes more registers than a block of 32. Zen 4,
// q5_k, M = 4: two rows 2.4 ms, four 3.5.
template <class Codec>
constexpr int dot_rows(int m) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return m == 1 ? 4 : m == 2 ? 3 : m <= 4 ? 2 : 1;
#else
  if (Codec::kBlockValues > kChunkValues) return m <= 3 ? 3 : 2;
  return m <= 4 ? 4 : m <= 6 ? 3 : 2;
#endif
}

constexpr int kPrefetchBytes = 512;

// The last values of a row, zero-padded to a chunk. Dense codecs only.
struct Tail {
  uint8_t bytes[kChunkValues * 4] = {};
  MM_INLINE Tail(const uint8_t* row, int64_t done, int64_t k, int value_bytes) {
    std::memcpy(bytes, row + done * value_bytes, (k - done) * value_bytes);
  }
};

// Owner: one thread; kRows rows of W at a time against all kM rows of x.
// Traffic: each block of W once, decoded once into registers; x once per kRows rows. The rows of a
// pass lie
//   a kRows-th of the range apart, so that each is one long stream for the prefetcher: Zen 4, one
//   thread, cold q4_0: 11.1 GB/s against 8.2 with neighbouring rows, where each stream restarts at
//   every row.
// Needs: x zero-padded to whole chunks. Rows beyond last_row read the last row and are not stored.
template <class Codec, int kRows, int kM>
struct Dot {
  using Block = typename Codec::Block;

  template <int kVector>
  static MM_INLINE void multiply(const Block* open, int chunk, const float* x,
                                 F (&acc)[kRows][kM]) {
    F w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) w[r] = Codec::template get<kVector>(open[r], chunk);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const F v = in_register(load(x + (kVector * kM + m) * kWidth));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][m] = fma(w[r], v, acc[r][m]);
    }
    if constexpr (kVector + 1 < kVectors) multiply<kVector + 1>(open, chunk, x, acc);
  }

  static MM_INLINE void multiply_block(const Block* open, const float* x, F (&acc)[kRows][kM]) {
#pragma GCC unroll 8
    for (int c = 0; c < Codec::kBlockValues / kChunkValues; ++c) {
      multiply<0>(open, c, x + c * kChunkValues * kM, acc);
    }
  }

  static MM_INLINE void multiply_rows(const DotArgs& a, const uint8_t* const* p,
                                      F (&acc)[kRows][kM]) {
    const int64_t blocks = a.weight.k / Codec::kBlockValues, done = blocks * Codec::kBlockValues;
    typename Codec::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = Codec::row(p[r], a.weight.layout);
    Block open[kRows];
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < Codec::kBlockBytes; i += 64) {
          __builtin_prefetch(p[r] + b * Codec::kBlockBytes + i + kPrefetchBytes);
        }
        Codec::open(row[r], b, open[r]);
      }
      multiply_block(open, a.x + b * Codec::kBlockValues * kM, acc);
    }
    if constexpr (Codec::kTailValueBytes > 0) {
      if (done == a.weight.k) return;
      for (int r = 0; r < kRows; ++r) {
        const Tail tail(p[r], done, a.weight.k, Codec::kTailValueBytes);
        F one[1][kM];
        for (int m = 0; m < kM; ++m) one[0][m] = acc[r][m];
        Block block;
        Codec::open(tail.bytes, 0, block);
        Dot<Codec, 1, kM>::multiply_block(&block, a.x + done * kM, one);
        for (int m = 0; m < kM; ++m) acc[r][m] = one[0][m];
      }
    }
  }

  static void run(const DotArgs& a) {
    const int64_t n_rows = a.last_row - a.first_row, passes = (n_rows + kRows - 1) / kRows;
    for (int64_t i = 0; i < passes; ++i) {
      const uint8_t* p[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t n = i + r * passes;
        p[r] = a.weight.row(a.first_row + (n < n_rows ? n : n_rows - 1));
      }
      F acc[kRows][kM] = {};
      multiply_rows(a, p, acc);
      for (int r = 0; r < kRows && i + r * passes < n_rows; ++r) {
        for (int m = 0; m < kM; ++m) a.y[m * a.y_stride + i + r * passes] = sum(acc[r][m]);
      }
    }
  }
};

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
constexpr CodecKernels codec_kernels(Indices<i...>) {
  return {{Dot<Codec, dot_rows<Codec>(kDotRows[i]), kDotRows[i]>::run...},
          decode<Codec, float>,
          decode<Codec, uint16_t>};
}

template <int... i>
constexpr IsaKernels kernels(const char* name, Indices<i...>) {
  static_assert(kPanelsPerTile <= kMaxPanels);
  using Dots = UpTo<kNumDotKernels>::type;
  return {name,
          kWidth,
          kTileRows,
          kPanelsPerTile,
          {tile<i + 1>...},
          kAttention,
          {
#define MM_FORMAT(name, Struct) codec_kernels<Struct>(Dots{}),
#include "metal/formats.def"
          }};
}

#define MM_STRING_(x) #x
#define MM_STRING(x) MM_STRING_(x)

extern const IsaKernels kKernels;
const IsaKernels kKernels = kernels(MM_STRING(MM_ISA), UpTo<kPanelsPerTile>::type{});

#define MM_BLOCK(name, Struct, values, bytes, ...) \
  static_assert(Struct::kBlockValues == values && Struct::kBlockBytes == bytes, #name);
#include "metal/formats.def"

}  // namespace metalmm::cpu::MM_ISA
