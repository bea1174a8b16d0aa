// Pieces: how the lanes of gemv divide a row, what they load, and the dot product with x.
//
// K is cut into units of kLanes * kValues values; each of kLanes lanes owns a piece of a unit:
// kValues values in runs of kRun, a run every kRunStride values, the first at first(piece). Lanes
// of a unit that are neighbours own neighbouring runs. A piece is kSegments segments of equal size.
//
//   static uint first(uint piece)
//   Cursor                           finds the data of a unit of a row
//   static Cursor start(Row row, uint unit), next(Cursor, uint units)
//   static Cursor moved(Cursor, long bytes)    the same unit of a row at that distance
//   struct Raw                       what a lane loads for a piece
//   static void fetch(Cursor, uint piece, thread Raw& raw)
//       All loads of a piece, so that a kernel can start those of several rows before it waits.
//   static void unpack(thread const Raw& raw, uint piece, Codebook book, thread Piece<Format>& p)
//       Codes as integers in f32. Value i of segment s is
//         p.d p.scale[s] p.q[i] / 2^(kChainBits (i % kChains)) + p.m p.offset[s]
//       without p.scale where kSegments is 1. kOffsets: 0, none; 1, one for the piece, without
//       p.offset; else one per segment.
//   kLastBias                        a constant on top of p.q in the last segment, whose product
//                                    starts from minus as much times the sum of x: with an
//                                    offset per segment only. Its error is then in proportion to
//                                    (bias + q) |x|: where large x meet codes of zero, more than
//                                    the bound of |w| |x| that exact codes keep
//   kHasCodebook                     unpack() reads `book`, which fill() has written
//   static half level(uint code)     with kHasCodebook: the value of a 4-bit code
#pragma once

#include "format.h"

namespace metalmm {

// The same format with shorter pieces, where K is shared by many lanes.
template <class Format>
struct ShortPiece {
  using type = Format;
};

// Two values of every byte of 4-bit codes, in threadgroup memory: low nibble, high nibble.
using Codebook = threadgroup const half2*;

// What a format with one scale, one chain and no offset does not say.
struct PlainPiece {
  MM_CONST int kSegments = 1, kOffsets = 0, kChains = 1, kChainBits = 0, kLastBias = 0;
  MM_CONST bool kHasCodebook = false;
};

template <class Format>
struct Piece {
  MM_CONST int kOffsets = Format::kOffsets > 1 ? Format::kOffsets : 1;
  float q[Format::kValues];
  float scale[Format::kSegments], offset[kOffsets];
  float d, m;
};

// x, the sums that offsets multiply, and what takes kLastBias away.
template <class Format>
struct XPiece {
  float x[Format::kValues], sum[Piece<Format>::kOffsets], last_start;
};

template <class Format>
METAL_FUNC void sum_segments(thread XPiece<Format>& x) {
  constexpr int kValues = Format::kValues / Piece<Format>::kOffsets;
  MM_UNROLL
  for (int s = 0; s < Format::kOffsets; ++s) {
    float sum = x.x[s * kValues];
    MM_UNROLL
    for (int i = 1; i < kValues; ++i) sum += x.x[s * kValues + i];
    x.sum[s] = sum;
  }
  if constexpr (Format::kLastBias != 0) {
    x.last_start = float(-Format::kLastBias) * x.sum[Format::kOffsets - 1];
  }
}

// Sum of q x over segment s, chain by chain.
template <class Format>
METAL_FUNC float dot_segment(thread const Piece<Format>& p, thread const XPiece<Format>& x, int s) {
  constexpr int kValues = Format::kValues / Format::kSegments, kChains = Format::kChains;
  constexpr float kUnit = 1.0f / (1 << Format::kChainBits);
  const bool is_biased = Format::kLastBias != 0 && s == Format::kSegments - 1;
  float chain[kChains];
  MM_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const float q = p.q[s * kValues + i], xi = x.x[s * kValues + i];
    if (is_biased && i == 0) {
      chain[0] = fma(q, xi, x.last_start);
    } else {
      chain[i % kChains] = i < kChains ? q * xi : fma(q, xi, chain[i % kChains]);
    }
  }
  float sum = chain[kChains - 1];
  MM_UNROLL
  for (int c = kChains - 2; c >= 0; --c) sum = fma(kUnit, sum, chain[c]);
  return sum;
}

// acc + sum of w x over a piece. One non-zero x gives w itself: q x, then scale q x, then d scale q
// x round only where the specification's d scale q does, and the offset is added once.
template <class Format>
METAL_FUNC float dot(thread const Piece<Format>& p, thread const XPiece<Format>& x, float acc) {
  float total = 0.0f, offset = 0.0f;
  if constexpr (Format::kSegments == 1) {
    total = dot_segment(p, x, 0);
  } else {
    MM_UNROLL
    for (int s = 0; s < Format::kSegments; ++s) {
      const float sum = dot_segment(p, x, s);
      total = s == 0 ? p.scale[0] * sum : fma(p.scale[s], sum, total);
    }
  }
  if constexpr (Format::kOffsets == 1) {
    offset = x.sum[0];
  } else {
    MM_UNROLL
    for (int s = 0; s < Format::kOffsets; ++s) {
      offset = s == 0 ? p.offset[0] * x.sum[0] : fma(p.offset[s], x.sum[s], offset);
    }
  }
  acc = fma(p.d, total, acc);
  if constexpr (Format::kOffsets > 0) acc = fma(p.m, offset, acc);
  return acc;
}

// Writes the codebook with all threads of a threadgroup; ends with a barrier.
template <class Format>
METAL_FUNC void fill(threadgroup half2* book, uint thread_index, uint threads) {
  if constexpr (Format::kHasCodebook) {
    for (uint byte = thread_index; byte < 256; byte += threads) {
      book[byte] = half2(Format::level(byte & 15), Format::level(byte >> 4));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace metalmm
