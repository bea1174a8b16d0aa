// GGML blocks of 32 values. Byte j of the codes holds value j (low nibble) and j + 16 (high).
// Two lanes share a block: lane p owns values [8p, 8p + 8) and [16 + 8p, 16 + 8p + 8).
// Issue cycles per weight (bitwise, convert, shift, fma, load) without the shared loads of x.
#pragma once

#include "format.h"

namespace metalmm {

template <int bytes>
struct Block32 : BlockFormat<32, bytes> {
  MM_CONST int kLanes = 2, kValues = 16, kRun = 8, kRunStride = 16, kSegments = 1;
  static uint first(uint piece) { return 8 * piece; }
};

// The four codes of a word of two bytes: values 2i, 2i + 1 of both runs, plus an integer.
inline void nibbles(uint word, int i, float add, thread float (&q)[16]) {
  const uint u = open_word(word);
  q[2 * i] = field(u, 4, 0, add);
  q[2 * i + 1] = field(u, 4, 8, add);
  q[8 + 2 * i] = field(u, 4, 4, add);
  q[9 + 2 * i] = field(u, 4, 12, add);
}

// The codes of 16 bytes, low or high nibbles, aligned to 2 bytes.
inline void nibbles16(device const uchar* qs, bool high, float add, thread float (&q)[16]) {
  MM_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint u = open_word(uint(load_as<ushort>(qs + 2 * i)) >> (high ? 4 : 0));
    q[2 * i] = field(u, 4, 0, add);
    q[2 * i + 1] = field(u, 4, 8, add);
  }
}

// d * (code - 8).  Per weight: 1.25 bitwise, 2.06 fma, 0.31 load = 3.3 + loads.
struct Q4_0 : Block32<18> {
  MM_CONST bool kHasOffset = false;
  static void load(Row row, uint unit, uint piece, Codebook, thread Piece<Q4_0>& p) {
    device const uchar* b = block(row, unit);
    MM_UNROLL
    for (int i = 0; i < 4; ++i) nibbles(load_as<ushort>(b + 2 + 8 * piece + 2 * i), i, -8, p.q);
    p.d = load_half(b);
  }
  static void decode16(Row row, uint k, thread float (&w)[16]) {
    device const uchar* b = block(row, k / 32);
    const float d = load_half(b);
    nibbles16(b + 2, k & 16, -8, w);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] *= d;
  }
};

}  // namespace metalmm
