// The dot kernels of one instruction set, by the codecs' own order: included by isa.cpp.
#pragma once

#include "codecs/codec.h"
#include "passes.h"

namespace metalmm::cpu::MM_ISA {

// Rows of W per pass for m rows of x: rows * m accumulators and the decoded weights live in
// registers, of which there are 32 (AVX-512, NEON) or 16. More rows share each load of x and give
// memory more streams; decoding a block of 256 takes more registers than a block of 32. Zen 4,
// q5_k, M = 4: two rows 2.4 ms, four 3.5. M = 8, where x comes from the second-level cache: q4_0
// with two rows 4.9 ms, with three 4.5, q4_k 5.1 and 5.4 (Xeon with AVX-512, 14336 x 4096).
// Rejected: rows decoded to memory, then tiles of 4 x 4 or 3 x 8 of parts of K, sums kept between
// them: q4_0 5.2.
template <class Codec>
constexpr int dot_rows(int m) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return m == 1 ? 4 : m == 2 ? 3 : m <= 4 ? 2 : 1;
#else
  if (Codec::kBlockValues > kChunkValues) return m <= 3 ? 3 : 2;
  return m <= 4 ? 4 : 3;
#endif
}

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
    const Stream<Codec> stream(a.weight);
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        stream.fetch(p[r], b, Codec::block_bytes(row[r]), kPrefetchBytes);
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

  static void run(const DotArgs& a) { run_passes<Codec, Dot, F[kM], kRows, kM>(a); }
};

}  // namespace metalmm::cpu::MM_ISA
