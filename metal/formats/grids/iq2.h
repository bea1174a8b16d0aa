// iq2_xxs, iq2_xs and iq2_s: magnitudes 8, 25 and 43 with signs, d (2 s + 1) / 8.
#pragma once

#include "grid.h"
#include "table_iq2.h"

namespace metalmm {

// 8 bytes per chunk from byte 2: four codes; four times 7 bits of signs, 4 bits of scale.
struct IQ2_XXSCodes {
  using Storage = LaneBlocks<256, 66, LaneOfChunk<2, 8>>;
  using Pieces = Chunks;
  struct Raw {
    uint codes, rest;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    device const uchar* p = Storage::part(c, 1, chunk);
    raw = {load_4<2>(p), load_4<2>(p + 4), load_as<half>(Storage::part(c, 0, chunk))};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d) * 0.125f; }
  static METAL_FUNC float factor(thread const Raw& raw, uint, uint) { return odd(raw.rest >> 28); }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint2 bytes = as_type<uint2>(kGridIQ2_XXS[raw.codes >> 8 * j & 255]);
    signed8(bytes, even_signs(raw.rest >> 7 * j), q);
  }
};
using IQ2_XXS = GridFormat<IQ2_XXSCodes>;

// A word of 16 bits per group from byte 2: 9 bits of code, 7 of signs; 4-bit scales from byte 66.
struct IQ2_XSCodes {
  using Storage = LaneBlocks<256, 74, LaneOfChunk<2, 8, 66, 1>>;
  using Pieces = HalvedChunks;
  struct Raw {
    uint2 words;
    uchar scales;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    raw = {load_8<2>(Storage::part(c, 1, chunk)), *Storage::part(c, 2, chunk),
           load_as<half>(Storage::part(c, 0, chunk))};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d) * 0.125f; }
  static METAL_FUNC float factor(thread const Raw& raw, uint, uint half_chunk) {
    return odd(raw.scales >> 4 * half_chunk & 15);
  }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint word = half_of(raw.words, j);
    signed8(as_type<uint2>(kGridIQ2_XS[word & 511]), even_signs(word >> 9), q);
  }
};
using IQ2_XS = GridFormat<IQ2_XSCodes>;

// 8 bits of each code from byte 2, signs of each group from byte 34, 2 bits of each code from
// byte 66, 4-bit scales from byte 74.
struct IQ2_SCodes {
  using Storage = LaneBlocks<256, 82, LaneOfChunk<2, 4, 66, 1>>;
  using Pieces = HalvedChunks;
  struct Raw {
    uint codes, signs;
    uchar high, scales;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    device const uchar* p = Storage::part(c, 1, chunk);
    device const uchar* bytes = Storage::part(c, 2, chunk);
    raw = {load_4<2>(p), load_4<2>(p + 32), bytes[0], bytes[8],
           load_as<half>(Storage::part(c, 0, chunk))};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d) * 0.125f; }
  static METAL_FUNC float factor(thread const Raw& raw, uint, uint half_chunk) {
    return odd(raw.scales >> 4 * half_chunk & 15);
  }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint code = (raw.codes >> 8 * j & 255) | (uint(raw.high) >> 2 * j & 3) << 8;
    signed8(as_type<uint2>(kGridIQ2_S[code]), signs_of(raw.signs >> 8 * j), q);
  }
};
using IQ2_S = GridFormat<IQ2_SCodes>;

}  // namespace metalmm
