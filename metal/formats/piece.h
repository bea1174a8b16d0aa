// Pieces: how the lanes of gemv divide a row, what they load, and the dot product with x.
//
// K is cut into units of kLanes * kValues values; each of kLanes lanes owns a piece of a unit:
// kValues values in runs of kRun, a run every kRunStride values. Lanes of a unit that are
// neighbours own neighbouring runs. A piece has kScales scales: one, or one for each run.
//
//   Pieces                           a PieceLayout: kLanes, kValues, kRun, kRunStride
//   Terms                            a PieceTerms: kScales, kOffsets, kChains ..., of unpack()
//   Subnormal                        SubnormalTerms, where the format has a second unpack(), whose
//                                    codes are subnormal halves; else none, or void
//   struct Raw                       what a lane loads for a piece
//   static void fetch(Storage::Cursor, uint piece, thread Raw& raw)
//       All loads of a piece, so that a kernel can start those of several rows before it waits.
//   static void unpack(thread const Raw& raw, uint piece, Codebook book,
//                      thread Piece<Format, Terms>& p)
//       Codes as integers in f32. Value i of scale s is
//         p.d p.scale[s] p.q[i] / 2^(kChainBits (i % kChains)) + p.m p.offset[s]
//       without p.scale where kScales is 1. kOffsets: 0, none; 1, one for the piece, without
//       p.offset; else one for each scale.
//   kBias, kFirstBiased              a constant on top of p.q under the scales from kFirstBiased
//   on,
//                                    with one scale in the chains from kFirstBiased on: their
//                                    products start from minus as much times the sum of their x.
//                                    The error is in proportion to (bias + q) |x|: where large x
//                                    meet codes of zero, more than the bound of |w| |x| that exact
//                                    codes keep
//   kHasCodebook                     unpack() reads `book`, which fill() has written
//   Levels                           with kHasCodebook: static half level(uint code), the value of
//                                    a 4-bit code
#pragma once

#include "format.h"

namespace metalmm {

// Two values of every byte of 4-bit codes, in threadgroup memory: low nibble, high nibble.
using Codebook = threadgroup const half2*;

// How the values of a unit are divided among lanes.
template <int lanes, int values, int run, int run_stride>
struct PieceLayout {
  MM_CONST int kLanes = lanes, kValues = values, kRun = run, kRunStride = run_stride;
  // Pieces that interleave their runs make a weave: the weave of a piece, the offset of its runs
  // within each stride, and its first value in the unit.
  static METAL_FUNC uint weave(uint piece) { return piece * uint(run) / run_stride; }
  static METAL_FUNC uint offset(uint piece) { return piece * uint(run) % run_stride; }
  static METAL_FUNC uint first(uint piece) {
    return uint(values / run * run_stride) * weave(piece) + offset(piece);
  }
};

// The terms that unpack() gives.
template <int scales, int offsets = 0, int chains = 1, int chain_bits = 0, int bias = 0,
          int first_biased = 0>
struct PieceTerms {
  MM_CONST int kScales = scales, kOffsets = offsets, kChains = chains, kChainBits = chain_bits;
  MM_CONST int kBias = bias;
  MM_CONST float kUnit = 1.0f;
  // Times the sum of x of a part, a scale or a chain: where its products start.
  static constexpr float start(int part) { return part >= first_biased ? float(-bias) : 0.0f; }
  // The i-th scale whose products are summed.
  static constexpr int order(int i) { return i; }
};

// PieceTerms of subnormal halves: p.q is 2^(place - 24) (code + bias), place the hexadecimal digit
// of the scale in `places`. p.d is 2^24 d; `unit`, where that may overflow: dot() multiplies.
template <int scales, int offsets, int bias = 0, uint places = 0, int chains = 1,
          int chain_bits = 0, bool unit = false>
struct SubnormalTerms {
  MM_CONST int kScales = scales, kOffsets = offsets, kChains = chains, kChainBits = chain_bits;
  MM_CONST int kBias = bias;
  MM_CONST float kUnit = unit ? kSubnormalUnit : 1.0f;
  static constexpr float start(int scale) {
    return -bias * float(1 << (places >> 4 * scale & 15)) / kSubnormalUnit;
  }
  // Runs t and t + 2 of four have words in common, which so take registers for less long: gemv of
  // q3_k has 128 half registers, 136 with its runs in their order.
  static constexpr int order(int i) { return scales == 4 ? i / 2 + i % 2 * 2 : i; }
};

// The terms that a vector kernel takes: a format's Subnormal, where it has such and the GPU keeps
// them.
template <class... T>
using Void = void;
template <class Format, class = void>
struct FormOf {
  using Subnormal = typename Format::Terms;
  static METAL_FUNC bool takes_subnormals() { return false; }
};
#if !defined(MM_CONVERTS_HALVES)  // before a product: a target of the stand-in
template <class Format>
struct FormOf<Format, Void<decltype(Format::Subnormal::kUnit)>> {
  using Subnormal = typename Format::Subnormal;
  static METAL_FUNC bool takes_subnormals() { return keeps_subnormals(); }
};
#endif

template <class Format, class Of = typename Format::Terms>
struct Piece {
  using Terms = Of;
  MM_CONST int kOffsets = Terms::kOffsets > 1 ? Terms::kOffsets : 1;
  float q[Format::Pieces::kValues];
  float scale[Terms::kScales], offset[kOffsets];
  float d, m;
};

// x, and its sums: under each offset or bias, or with biased chains of each of them.
template <class Format, class Of = typename Format::Terms>
struct XPiece {
  using Terms = Of;
  MM_CONST bool kByChain = Terms::kBias != 0 && Terms::kScales == 1;
  MM_CONST bool kByScale = Terms::kBias != 0 && Terms::kOffsets == 0;
  MM_CONST int kSums = kByChain   ? Terms::kChains
                       : kByScale ? Terms::kScales
                                  : Piece<Format, Terms>::kOffsets;
  float x[Format::Pieces::kValues], sum[kSums];
};

template <class Format, class Terms>
METAL_FUNC void sum_for_offsets(thread XPiece<Format, Terms>& x) {
  if constexpr (Terms::kOffsets > 0 || Terms::kBias != 0) {
    using X = XPiece<Format, Terms>;
    constexpr int kValues = Format::Pieces::kValues / X::kSums;
    constexpr int kStep = X::kByChain ? X::kSums : 1;
    MM_UNROLL
    for (int s = 0; s < X::kSums; ++s) {
      const int first = X::kByChain ? s : s * kValues;
      float sum = x.x[first];
      MM_UNROLL
      for (int i = 1; i < kValues; ++i) sum += x.x[first + i * kStep];
      x.sum[s] = sum;
    }
  }
}

// Sum of q x over the values of scale s, chain by chain.
template <class Format, class Terms>
METAL_FUNC float dot_of_scale(thread const Piece<Format, Terms>& p,
                              thread const XPiece<Format, Terms>& x, int s) {
  constexpr int kValues = Format::Pieces::kValues / Terms::kScales, kChains = Terms::kChains;
  constexpr float kPlace = 1.0f / (1 << Terms::kChainBits);
  static_assert(Terms::kBias == 0 || kChains == 1 || Terms::kScales == 1, "biased by one of both");
  float chain[kChains];
  MM_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const float q = p.q[s * kValues + i], xi = x.x[s * kValues + i];
    const int part = XPiece<Format, Terms>::kByChain ? i : s;
    if (i >= kChains) {
      chain[i % kChains] = fma(q, xi, chain[i % kChains]);
    } else if (Terms::start(part) != 0.0f) {
      chain[i] = fma(q, xi, Terms::start(part) * x.sum[part]);
    } else {
      chain[i] = q * xi;
    }
  }
  float sum = chain[kChains - 1];
  MM_UNROLL
  for (int c = kChains - 2; c >= 0; --c) sum = fma(kPlace, sum, chain[c]);
  return sum;
}

// acc + sum of w x over a piece. One non-zero x gives w itself: q x, then scale q x, then d scale q
// x round only where the specification's d scale q does, and the offset is added once.
template <class Format, class Terms>
METAL_FUNC float dot(thread const Piece<Format, Terms>& p, thread const XPiece<Format, Terms>& x,
                     float acc) {
  float total = 0.0f, offset = 0.0f;
  if constexpr (Terms::kScales == 1) {
    total = dot_of_scale(p, x, 0);
    if constexpr (Terms::kUnit != 1.0f) total *= Terms::kUnit;
  } else {
    float sums[Terms::kScales];
    MM_UNROLL
    for (int i = 0; i < Terms::kScales; ++i) {
      const int s = Terms::order(i);
      sums[s] = dot_of_scale(p, x, s);
    }
    MM_UNROLL
    for (int s = 0; s < Terms::kScales; ++s) {
      total = s == 0 ? p.scale[0] * sums[0] : fma(p.scale[s], sums[s], total);
    }
  }
  if constexpr (Terms::kOffsets == 1) {
    offset = x.sum[0];
    MM_UNROLL
    for (int c = 1; c < XPiece<Format, Terms>::kSums; ++c) offset += x.sum[c];
  } else {
    MM_UNROLL
    for (int s = 0; s < Terms::kOffsets; ++s) {
      offset = s == 0 ? p.offset[0] * x.sum[0] : fma(p.offset[s], x.sum[s], offset);
    }
  }
  acc = fma(p.d, total, acc);
  if constexpr (Terms::kOffsets > 0) acc = fma(p.m, offset, acc);
  return acc;
}

// Writes the codebook with all threads of a threadgroup; ends with a barrier.
template <class Format>
METAL_FUNC void fill(threadgroup half2* book, uint thread_index, uint threads) {
  if constexpr (Format::kHasCodebook) {
    for (uint byte = thread_index; byte < 256; byte += threads) {
      book[byte] = half2(Format::Levels::level(byte & 15), Format::Levels::level(byte >> 4));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace metalmm
