// The common parts of formats whose codes are indices of grids: iq1_s, iq1_m, iq2_*, iq3_*.
// A block is 256 values, a lane owns a chunk of 32: four groups of 8, each with a code (iq3: two).
// What tells such formats apart is a struct of
//
//   Storage, Pieces                      Chunks or HalvedChunks
//   Raw                                  of a chunk
//   fetch(cursor, chunk, raw)            its loads
//   float spacing(raw)                   d of the block, times a power of two
//   float factor(raw, chunk, i)          an odd integer, of values [16 i, 16 i + 16)
//   void eight(raw, chunk, j, q)         the values of group j
// w = spacing factor value, exact: at most 22 bits.
//
// Grids are in the constant address space, 0.5 to 8 KB each, and a lookup is one load for 8 values.
// Rejected: threadgroup memory, as for tables of 16 levels: every threadgroup would write up to
// 8 KB before it begins, and hold them.
#pragma once

#include "../blocks.h"
#include "../piece.h"
#include "signs.h"

namespace metalmm {

// One scale (PieceTerms) for a chunk, or one for each half.
using Chunks = PieceLayout<8, 32, 32, 32>;
using HalvedChunks = PieceLayout<8, 32, 16, 16>;

// The block, and up to three parts of which a chunk has `step` bytes, the first from byte `at` on.
template <int at1, int step1, int at2 = 0, int step2 = 0, int at3 = 0, int step3 = 0>
struct LaneOfChunk {
  MM_CONST int kParts = step3 != 0 ? 4 : step2 != 0 ? 3 : 2;
  static METAL_FUNC uint at(int part, uint chunk) {
    return part == 0   ? 0
           : part == 1 ? at1 + step1 * chunk
           : part == 2 ? at2 + step2 * chunk
                       : at3 + step3 * chunk;
  }
};

// The format of such codes.
template <class Codes>
struct GridFormat {
  using Storage = typename Codes::Storage;
  using Pieces = typename Codes::Pieces;
  using Raw = typename Codes::Raw;
  MM_CONST bool kIsHalved = is_same<Pieces, HalvedChunks>::value;
  using Terms = PieceTerms<kIsHalved ? 2 : 1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;

  static METAL_FUNC void fetch(typename Storage::Cursor c, uint chunk, thread Raw& raw) {
    Codes::fetch(c, chunk, raw);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint chunk, Codebook,
                                thread Piece<GridFormat>& p) {
    MM_UNROLL
    for (int j = 0; j < 4; ++j) Codes::eight(raw, chunk, j, p.q + 8 * j);
    p.d = Codes::spacing(raw);
    if constexpr (!kIsHalved) {
      p.d *= Codes::factor(raw, chunk, 0);
    } else {
      MM_UNROLL
      for (int i = 0; i < 2; ++i) p.scale[i] = Codes::factor(raw, chunk, i);
    }
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const uint chunk = (k & 255) / 32, half_chunk = (k & 16) / 16;
    Raw raw;
    Codes::fetch(Storage::start(row, k / 256, chunk), chunk, raw);
    Codes::eight(raw, chunk, 2 * half_chunk, w);
    Codes::eight(raw, chunk, 2 * half_chunk + 1, w + 8);
    scale16(Codes::spacing(raw) * Codes::factor(raw, chunk, half_chunk), -0.0f, w);
  }
  template <int width>
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    decode16(row, k, w);
  }
};

// Field j of two words, of 16 bits.
METAL_FUNC uint half_of(uint2 words, uint j) { return (j < 2 ? words.x : words.y) >> 16 * (j & 1); }

// 2 s + 1.
METAL_FUNC float odd(uint s) { return float(2 * s + 1); }

// ---- signed bytes

// Magnitudes in bytes, negative under the bytes of a mask: no carry, since none of them is 0.
METAL_FUNC uint negated(uint bytes, uint mask) { return (bytes ^ mask) + (mask & 0x01010101u); }

// Eight int8 as integers: flipping the sign bit adds 128. Halves, where a product reads them as
// they are: they take half of the registers.
METAL_FUNC void int8x8(uint2 words, thread float* q) {
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
#if defined(MM_CONVERTS_HALVES)
    MM_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint u = half_word(words[i], j) ^ (kExponent23 | 0x8080u);
      q[4 * i + 2 * j] = field<8, 0>(u, -128);
      q[4 * i + 2 * j + 1] = field<8, 8>(u, -128);
    }
#else
    const half2 even = as_type<half2>((words[i] & 0x00FF00FFu) ^ (kExponent10 | 0x00800080u));
    const half2 odd = as_type<half2>((words[i] >> 8 & 0x00FF00FFu) ^ (kExponent10 | 0x00800080u));
    MM_UNROLL
    for (int j = 0; j < 2; ++j) {
      q[4 * i + 2 * j] = float(even[j] - 1152.0h);
      q[4 * i + 2 * j + 1] = float(odd[j] - 1152.0h);
    }
#endif
  }
}
METAL_FUNC void signed8(uint2 bytes, uint2 mask, thread float* q) {
  int8x8(uint2(negated(bytes.x, mask.x), negated(bytes.y, mask.y)), q);
}
// Masks of signs: 7 bits, and 8.
METAL_FUNC uint2 even_signs(uint code) { return as_type<uint2>(kEvenSigns[code & 127]); }
METAL_FUNC uint2 signs_of(uint code) {
  return uint2(kFourSigns[code & 15], kFourSigns[code >> 4 & 15]);
}

}  // namespace metalmm
