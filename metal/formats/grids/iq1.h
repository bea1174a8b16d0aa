// iq1_s and iq1_m: values of -1, 0 and 1, plus or minus an eighth.
#pragma once

#include "grid.h"
#include "table_iq1.h"

namespace metalmm {

// The values of a code, plus delta; as int8x8.
#if defined(MM_CONVERTS_HALVES)
METAL_FUNC void crumbs8(uint code, float delta, thread float* q) {
  const uint u = open_word(kGridIQ1[code]);
  q[0] = field<2, 0>(u, -1) + delta;
  q[1] = field<2, 2>(u, -1) + delta;
  q[2] = field<2, 4>(u, -1) + delta;
  q[3] = field<2, 6>(u, -1) + delta;
  q[4] = field<2, 8>(u, -1) + delta;
  q[5] = field<2, 10>(u, -1) + delta;
  q[6] = field<2, 12>(u, -1) + delta;
  q[7] = field<2, 14>(u, -1) + delta;
}
#else
template <int t>
METAL_FUNC void crumbs2(uint opened, half delta, thread float* q) {
  const half place = half(1.0f / (1 << 2 * t)), bias = half(-1.0f - 1024.0f / (1 << 2 * t));
  const half2 two = pair<2, 2 * t>(opened);
  q[t] = float(fma(two.x, place, bias) + delta);
  q[4 + t] = float(fma(two.y, place, bias) + delta);
}
METAL_FUNC void crumbs8(uint code, float delta, thread float* q) {
  const ushort word = kGridIQ1[code];
  const uint opened = open_pair(as_type<uint>(ushort2(word, ushort(word >> 8))) & 0x00FF00FFu);
  crumbs2<0>(opened, half(delta), q);
  crumbs2<1>(opened, half(delta), q);
  crumbs2<2>(opened, half(delta), q);
  crumbs2<3>(opened, half(delta), q);
}
#endif

// 8 bits of each code from byte 2; a word per chunk from byte 34: 3 bits of each code, a 3-bit
// scale, the sign of the eighth.
struct IQ1_SCodes {
  using Storage = LaneBlocks<256, 50, LaneOfChunk<2, 4, 34, 2>>;
  using Pieces = Chunks;
  struct Raw {
    uint codes;
    ushort rest;
    half d;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    raw = {load_4<2>(Storage::part(c, 1, chunk)), load_as<ushort>(Storage::part(c, 2, chunk)),
           load_as<half>(Storage::part(c, 0, chunk))};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC float factor(thread const Raw& raw, uint, uint) {
    return odd(raw.rest >> 12 & 7);
  }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const float delta = (raw.rest & 0x8000u) != 0 ? -0.125f : 0.125f;
    crumbs8((raw.codes >> 8 * j & 255) | (raw.rest >> 3 * j & 7) << 8, delta, q);
  }
};
using IQ1_S = GridFormat<IQ1_SCodes>;

// 8 bits of each code from byte 0; a nibble per group from byte 32: 3 bits of its code, the sign of
// the eighth; 3-bit scales of halves of chunks from byte 48, four in a word of 16 bits, whose top
// nibbles make d.
struct IQ1_MCodes {
  using Storage = LaneBlocks<256, 56, LaneOfChunk<0, 4, 32, 2>>;
  using Pieces = HalvedChunks;
  struct Raw {
    uint codes;
    ushort rest;
    uint2 scales;
  };
  static METAL_FUNC void fetch(Storage::Cursor c, uint chunk, thread Raw& raw) {
    raw = {load_as<uint>(Storage::part(c, 1, chunk)), load_as<ushort>(Storage::part(c, 2, chunk)),
           load_as<uint2>(Storage::part(c, 0, chunk) + 48)};
  }
  static METAL_FUNC float spacing(thread const Raw& raw) {
    const uint low = (raw.scales.x >> 12 & 0x000Fu) | (raw.scales.x >> 24 & 0x00F0u);
    const uint high = (raw.scales.y >> 4 & 0x0F00u) | (raw.scales.y >> 16 & 0xF000u);
    return float(as_type<half>(ushort(low | high)));
  }
  static METAL_FUNC float factor(thread const Raw& raw, uint chunk, uint half_chunk) {
    return odd(half_of(raw.scales, chunk / 2) >> (6 * (chunk & 1) + 3 * half_chunk) & 7);
  }
  static METAL_FUNC void eight(thread const Raw& raw, uint, uint j, thread float* q) {
    const uint nibble = raw.rest >> 4 * j;
    const float delta = (nibble & 8) != 0 ? -0.125f : 0.125f;
    crumbs8((raw.codes >> 8 * j & 255) | (nibble & 7) << 8, delta, q);
  }
};
using IQ1_M = GridFormat<IQ1_MCodes>;

}  // namespace metalmm
