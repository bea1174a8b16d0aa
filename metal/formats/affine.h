// scale * code + bias, one scale and bias per group of 32, 64 or 128 values (a function constant).
// A row is three planes: codes (a little-endian bit stream) | scales | biases. Each lane owns 16
// consecutive values.
#pragma once

#include "format.h"

namespace metalmm {

struct AffineRow {
  device const uchar* p;
  uint scales, biases;  // byte offsets of the planes
};

// A field that starts at bit 0 ... 15 of a 16-bit word ends below bit 23 of the word and the next
// one, so no code of the stream needs a shift.
// Bitwise 1.25 (2 bits), 1.4 (3), 1.4 (4), 1.7 (5), 1.75 (6), 1.6 (8), 0.06 shift, 2.12 fma, 0.2 to
// 0.5 load: 3.6, 3.8, 3.8, 4.1, 4.1, 4.0 cycles.
template <int bits>
struct Affine {
  MM_CONST int kBlockValues = 16, kBlockBytes = 2 * bits;
  MM_CONST int kLanes = 1, kValues = 16, kRun = 16, kRunStride = 16, kSegments = 1;
  MM_CONST bool kHasOffset = true, kHasCodebook = false, kIsDense = false;
  using Row = AffineRow;

  static METAL_FUNC Row row(device const uchar* p, constant KernelArgs& args) {
    return {p, args.scales_offset, args.biases_offset};
  }
  static METAL_FUNC uint first(uint) { return 0; }

  template <int i>
  static METAL_FUNC void fields(thread const uint (&alone)[bits], thread const uint (&both)[bits],
                                thread float (&q)[16]) {
    constexpr int kAt = i * bits / 16, kShift = i * bits % 16;
    q[i] = field<bits, kShift>(kShift + bits <= 16 ? alone[kAt] : both[kAt]);
    if constexpr (i < 15) fields<i + 1>(alone, both, q);
  }
  static METAL_FUNC void codes(device const uchar* p, thread float (&q)[16]) {
    ushort halves[bits + 1];
    MM_UNROLL
    for (int i = 0; i < bits; ++i) {
      if constexpr (bits == 8) {
        halves[i] = as_type<ushort2>(load_as<uint4>(p)[i / 2])[i % 2];
      } else if constexpr (bits == 4) {
        halves[i] = load_as<ushort4>(p)[i];
      } else if constexpr (bits % 2 == 0) {
        halves[i] = load_as<ushort2>(p + i / 2 * 4)[i % 2];
      } else {
        halves[i] = load_as<ushort>(p + 2 * i);
      }
    }
    halves[bits] = 0;
    uint alone[bits], both[bits];
    MM_UNROLL
    for (int i = 0; i < bits; ++i) {
      alone[i] = open_word(halves[i]);
      both[i] = open_word(as_type<uint>(ushort2(halves[i], halves[i + 1])));
    }
    fields<0>(alone, both, q);
  }
  static METAL_FUNC float parameter(device const uchar* plane, uint group) {
    if (fc_scale_type == 0) return load_half(plane + 2 * group);
    if (fc_scale_type == 1) return float(load_as<bfloat>(plane + 2 * group));
    return load_as<float>(plane + 4 * group);
  }
  static METAL_FUNC uint group_of(uint unit) {
    return unit >> (fc_group == 32 ? 1 : fc_group == 64 ? 2 : 3);
  }

  static METAL_FUNC void load(Row row, uint unit, uint, Codebook, thread Piece<Affine>& p) {
    codes(row.p + unit * uint(2 * bits), p.q);
    p.d = parameter(row.p + row.scales, group_of(unit));
    p.m = parameter(row.p + row.biases, group_of(unit));
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    const uint unit = k / 16;
    codes(row.p + unit * uint(2 * bits), w);
    const float scale = parameter(row.p + row.scales, group_of(unit));
    const float bias = parameter(row.p + row.biases, group_of(unit));
    MM_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float product = scale * w[i];  // rounded on its own where scales are f32
      w[i] = product + bias;
    }
  }
};
using Affine2 = Affine<2>;
using Affine3 = Affine<3>;
using Affine4 = Affine<4>;
using Affine5 = Affine<5>;
using Affine6 = Affine<6>;
using Affine8 = Affine<8>;

}  // namespace metalmm
