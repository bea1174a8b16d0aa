// iq3_xxs and iq3_s: a code stands for four magnitudes, 4 to 62 and 1 to 15.
#pragma once

#include "grid.h"
#include "table_iq3.h"

namespace metalmm {

// d (2 s + 1) / 4. Codes from byte 2; from byte 66 a word per chunk: four times 7 bits of signs,
// 4 bits of scale.
struct IQ3_XXSCodes {
  using Storage = LaneBlocks<256, 98, LaneOfChunk<2, 8, 66, 4>>;
  using Pieces = Chunks;
  struct Raw {
    uint2 codes;
    uint rest;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    raw = {load_8<2>(Storage::part(c, 1, chunk)), load_4<2>(Storage::part(c, 2, chunk)),
           load_as<half>(Storage::part(c, 0, chunk))};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d) * 0.25f; }
  static METAL_FUNC float factor(thread const Raw& raw, uint, uint) { return odd(raw.rest >> 28); }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint codes = half_of(raw.codes, j);
    const uint2 bytes = uint2(kGridIQ3_XXS[codes & 255], kGridIQ3_XXS[codes >> 8 & 255]);
    signed8(bytes, even_signs(raw.rest >> 7 * j), q);
  }
};
using IQ3_XXS = GridFormat<IQ3_XXSCodes>;

// d (2 s + 1). 8 bits of each code from byte 2, the ninth from byte 66, signs of each group from
// byte 74, 4-bit scales of chunks from byte 106.
struct IQ3_SCodes {
  using Storage = LaneBlocks<256, 110, LaneOfChunk<2, 8, 74, 4, 66, 1>>;
  using Pieces = Chunks;
  struct Raw {
    uint2 codes;
    uint signs, scales;
    uchar high;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    device const uchar* b = Storage::part(c, 0, chunk);
    raw = {load_8<2>(Storage::part(c, 1, chunk)), load_4<2>(Storage::part(c, 2, chunk)),
           load_4<2>(b + 106), *Storage::part(c, 3, chunk), load_as<half>(b)};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC float factor(thread const Raw& raw, uint chunk, uint) {
    return odd(raw.scales >> 4 * chunk & 15);
  }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint codes = half_of(raw.codes, j), high = uint(raw.high) >> 2 * j;
    const uint first = (codes & 255) | (high & 1) << 8;
    const uint second = (codes >> 8 & 255) | (high & 2) << 7;
    signed8(uint2(kGridIQ3_S[first], kGridIQ3_S[second]), signs_of(raw.signs >> 8 * j), q);
  }
};
using IQ3_S = GridFormat<IQ3_SCodes>;

}  // namespace metalmm
