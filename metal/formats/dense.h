// Values as they are. K is any number: units are whole pieces, the kernels take the tail by
// value(). Rows are aligned to a value, to 16 bytes only where a function constant says so.
#pragma once

#include "format.h"

namespace metalmm {

// 1.1 (f16, bf16) or 1.25 (f32) fma, 0.12 or 0.25 load.
template <class V>
struct Dense : BlockFormat<1, sizeof(V)> {
  MM_CONST int kLanes = 1, kValues = 16 / sizeof(V), kRun = kValues, kRunStride = kValues;
  MM_CONST int kSegments = 1;
  MM_CONST bool kHasOffset = false, kIsDense = true;
  using Row = device const uchar*;

  static METAL_FUNC uint first(uint) { return 0; }
  static METAL_FUNC float value(Row row, uint k) {
    return float(load_as<V>(row + k * uint(sizeof(V))));
  }

  static METAL_FUNC void values(Row row, uint k, thread float* w) {
    device const uchar* p = row + k * uint(sizeof(V));
    if (weight_is_aligned()) {
      const uint4 words = load_as<uint4>(p);
      MM_UNROLL
      for (int i = 0; i < kValues; ++i) {
        if constexpr (sizeof(V) == 4) {
          w[i] = as_type<float>(words[i]);
        } else {
          w[i] = float(as_type<vec<V, 2>>(words[i / 2])[i % 2]);
        }
      }
    } else {
      MM_UNROLL
      for (int i = 0; i < kValues; ++i) w[i] = value(row, k + i);
    }
  }
  static METAL_FUNC void load(Row row, uint unit, uint, Codebook, thread Piece<Dense>& p) {
    values(row, unit * kValues, p.q);
    p.d = 1.0f;
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    MM_UNROLL
    for (int i = 0; i < 16; i += kValues) values(row, k + i, w + i);
  }
};
using F32 = Dense<float>;
using F16 = Dense<half>;
using BF16 = Dense<bfloat>;

}  // namespace metalmm
