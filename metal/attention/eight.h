// Eight values of a row of a cache: what a lane of attention_split owns. For the formats that a
// shader stores.
//
//   Layout::value(piece, i)    which value of the row is value i of a piece; kRun follow each other
//   struct Raw, fetch(row, t, stride, piece)   all loads of a piece of the row t rows of `stride`
//                              bytes behind `row`, so that those of several slots are under way
//                              before the first is unpacked
//   unpack(raw, piece, q)      value i is scale(raw) q[i]
//   scale(raw)                 the scale; a constant 1 where a format has offsets, or no scales
//   drop(raw)                  makes the values of a piece zeros
#pragma once

#include "../formats/codebook.h"
#include "../formats/dense.h"

namespace metalmm {

// Pieces of runs of `run` values, a run every `stride`; neighbours own neighbouring runs.
template <int run, int stride>
struct EightLayout {
  MM_CONST int kRun = run;
  static METAL_FUNC uint value(uint piece, int i) {
    const uint block = 8 / run * stride;
    return piece * 8 / block * block + piece * run % stride + i / run * stride + i % run;
  }
};

// Value i, of `bytes` bytes, of row t behind a row: an index of 32 bits, which the loads of an
// Apple GPU add to an address, times the size of what they load.
template <int bytes>
METAL_FUNC device const uchar* at(Row row, uint t, uint stride, uint i = 0) {
  struct Value {
    uchar byte[bytes];
  };
  return reinterpret_cast<device const uchar*>(reinterpret_cast<device const Value*>(row) +
                                               (t * (stride / bytes) + i));
}

template <class Format>
struct Eight;

template <class V>
struct Eight<Dense<V>> {
  using Layout = EightLayout<8, 8>;
  MM_CONST int kLoads = sizeof(V) / 2;  // loads of 16 bytes
  struct Raw {
    uint4 words[kLoads];
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    Raw raw;
    MM_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const uint own = piece * kLoads + i;
      device const uchar* p = weight_is_aligned()
                                  ? at<16>(row, t, stride, own)
                                  : at<sizeof(V)>(row, t, stride, own * (16 / sizeof(V)));
      raw.words[i] = load_16_of<sizeof(V)>(p, weight_is_aligned());
    }
    return raw;
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, thread float (&q)[8]) {
    MM_UNROLL
    for (int i = 0; i < kLoads; ++i) Dense<V>::values(raw.words[i], q + i * Dense<V>::kValues);
  }
  static METAL_FUNC float scale(thread const Raw&) { return 1.0f; }
  static METAL_FUNC void drop(thread Raw& raw) { raw = Raw{}; }
};

// ---- blocks of 32 values, a piece the codes of 4 bytes of one or of 8 bytes

// q = d q + m, as scale16.
METAL_FUNC void scale8(float d, float m, thread float (&q)[8]) {
  MM_UNROLL
  for (int i = 0; i < 8; ++i) q[i] = fma(d, q[i], m);
}

template <>
struct Eight<Q8_0> {
  using Layout = EightLayout<8, 8>;
  MM_CONST uint kSigns = 0x80808080;  // as Q8_0::kSigns
  struct Raw {
    Window<10> bytes;
    half d;
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    // Without long blocks two words as a window that begins 2 behind the first has them.
    const uint block = piece / 4 * 34, inner = piece % 4 * 8;
    const half d = load_as<half>(at<2>(row, t, stride, block / 2));
    if (has_long_blocks()) {
      return {Window<10>::load<8>(row + t * stride, block, inner), d};
    }
    const uint2 codes = load_8<2>(at<2>(row, t, stride, (block + 2 + inner) / 2));
    return {{{0, codes.x, codes.y}, true}, d};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, thread float (&q)[8]) {
    const uint2 words = {raw.bytes.word<2>(raw.bytes), raw.bytes.word<6>(raw.bytes)};
    MM_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uchar byte = as_type<uchar4>(words[i / 4] ^ kSigns)[i % 4];
      q[i] = as_type<float>(uchar4(byte, 0, 0, kExponent23 >> 24)) - (8388608.0f + 128.0f);
    }
  }
  static METAL_FUNC float scale(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = 0.0h; }
};

// 4-bit codes: the nibbles of bytes [4 p, 4 p + 4), values 4 p + i and 16 + 4 p + i.
using NibbleLayout = EightLayout<4, 16>;

METAL_FUNC void nibbles8(uint codes, float add, thread float (&q)[8]) {
  MM_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint u = open_word(half_word(codes, i));
    q[2 * i] = field<4, 0>(u, add);
    q[2 * i + 1] = field<4, 8>(u, add);
    q[4 + 2 * i] = field<4, 4>(u, add);
    q[5 + 2 * i] = field<4, 12>(u, add);
  }
}

// Adds 16 times the bits of `fifth`: 4 p + i of the low codes, 16 more of the high ones.
METAL_FUNC void add_fifth8(uint fifth, uint piece, thread float (&q)[8]) {
  const uint own = fifth >> (piece % 4 * 4);
  MM_UNROLL
  for (int i = 0; i < 4; ++i) {
    q[i] += own & (1u << i) ? 16.0f : 0.0f;
    q[4 + i] += own & (0x10000u << i) ? 16.0f : 0.0f;
  }
}

// A scale and codes of 4 bits behind it: 4 bytes in the halves of two words, or in the second.
struct EightOfScale {
  struct Raw {
    uint words[2];
    half d;
    bool late;
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    const uint block = piece / 4 * 18, inner = piece % 4 * 4;
    Raw raw;
    raw.d = load_as<half>(at<2>(row, t, stride, block / 2));
    raw.late = has_word_blocks() && block % 4 != 0;
    if (has_word_blocks()) {
      raw.words[0] = load_as<uint>(at<4>(row, t, stride, (block + inner) / 4));
      raw.words[1] = load_as<uint>(at<4>(row, t, stride, (block + inner) / 4 + 1));
    } else {  // not put together here, where LLVM would make one load of both branches
      device const uchar* p = at<2>(row, t, stride, (block + 2 + inner) / 2);
      raw.words[0] = uint(load_as<ushort>(p)) << 16;
      raw.words[1] = load_as<ushort>(p + 2);
    }
    return raw;
  }
  static METAL_FUNC uint codes(thread const Raw& raw) {
    const uint cut = as_type<uint>(ushort2(half_word(raw.words[0], 1), half_word(raw.words[1], 0)));
    return raw.late ? raw.words[1] : cut;
  }
};

template <>
struct Eight<Q4_0> {
  using Layout = NibbleLayout;
  using Raw = EightOfScale::Raw;
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    return EightOfScale::fetch(row, t, stride, piece);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, thread float (&q)[8]) {
    nibbles8(EightOfScale::codes(raw), -8, q);
  }
  static METAL_FUNC float scale(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = 0.0h; }
};

template <>
struct Eight<IQ4_NL> {
  using Layout = NibbleLayout;
  using Raw = EightOfScale::Raw;
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    return EightOfScale::fetch(row, t, stride, piece);
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, thread float (&q)[8]) {
    const uint codes = EightOfScale::codes(raw);
    MM_UNROLL
    for (int i = 0; i < 4; ++i) {
      q[i] = float(IQ4_NL::Levels::level(codes >> (8 * i) & 15));
      q[4 + i] = float(IQ4_NL::Levels::level(codes >> (8 * i + 4) & 15));
    }
  }
  static METAL_FUNC float scale(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = 0.0h; }
};

template <>
struct Eight<Q4_1> {
  using Layout = NibbleLayout;
  struct Raw {
    uint codes;
    half2 d;
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    device const uchar* b = at<2>(row, t, stride, piece / 4 * 20 / 2);
    return {load_as<uint>(b + 4 + piece % 4 * 4), load_as<half2>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, thread float (&q)[8]) {
    nibbles8(raw.codes, 0, q);
    scale8(float(raw.d.x), float(raw.d.y), q);
  }
  static METAL_FUNC float scale(thread const Raw&) { return 1.0f; }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = half2(0.0h); }
};

template <>
struct Eight<Q5_0> {
  using Layout = NibbleLayout;
  struct Raw {
    uint codes, fifth;
    half d;
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    device const uchar* b = at<2>(row, t, stride, piece / 4 * 22 / 2);
    return {load_4<2>(b + 6 + piece % 4 * 4), load_4<2>(b + 2), load_as<half>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, thread float (&q)[8]) {
    nibbles8(raw.codes, -16, q);
    add_fifth8(raw.fifth, piece, q);
  }
  static METAL_FUNC float scale(thread const Raw& raw) { return float(raw.d); }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = 0.0h; }
};

template <>
struct Eight<Q5_1> {
  using Layout = NibbleLayout;
  struct Raw {
    uint codes, fifth;
    half2 d;
  };
  static METAL_FUNC Raw fetch(Row row, uint t, uint stride, uint piece) {
    device const uchar* b = at<2>(row, t, stride, piece / 4 * 24 / 2);
    return {load_as<uint>(b + 8 + piece % 4 * 4), load_as<uint>(b + 4), load_as<half2>(b)};
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint piece, thread float (&q)[8]) {
    nibbles8(raw.codes, 0, q);
    add_fifth8(raw.fifth, piece, q);
    scale8(float(raw.d.x), float(raw.d.y), q);
  }
  static METAL_FUNC float scale(thread const Raw&) { return 1.0f; }
  static METAL_FUNC void drop(thread Raw& raw) { raw.d = half2(0.0h); }
};

}  // namespace metalmm
