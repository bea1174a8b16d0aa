// Values as they are. K is any number: units are whole pieces, the kernels take the tail by
// value(). Rows are aligned to a value, to 16 bytes only where a function constant says so.
#pragma once

#include "piece.h"

namespace metalmm {

// A unit is 16 bytes.
template <class V>
struct DenseValues {
  MM_CONST int kBlockValues = 1, kBlockBytes = sizeof(V);
  MM_CONST bool kHasWidths = false;
  static METAL_FUNC uint row_bytes() { return fc_k * uint(sizeof(V)); }
  using Cursor = device const uchar*;
  static METAL_FUNC Cursor start(Row row, uint unit, uint) { return row + unit * 16; }
  static METAL_FUNC Cursor next(Cursor p, uint units) { return p + units * 16; }
  static METAL_FUNC Cursor moved(Cursor p, long distance) { return p + distance; }
};

template <class V>
struct Dense {
  MM_CONST int kValues = 16 / sizeof(V);
  using Storage = DenseValues<V>;
  using Pieces = PieceLayout<1, kValues, kValues, kValues>;
  using Terms = PieceTerms<1>;
  MM_CONST bool kHasCodebook = false, kDecodesHalves = false, kHalvesAreExact = true;

  static METAL_FUNC float value(Row row, uint k) {
    return float(load_as<V>(row + k * uint(sizeof(V))));
  }

  // 16 bytes of values.
  struct Raw {
    uint4 words;
  };
  static METAL_FUNC void fetch(device const uchar* p, uint, thread Raw& raw) {
    raw.words = load_16_of<sizeof(V)>(p, weight_is_aligned());
  }
  static METAL_FUNC void values(uint4 words, thread float* w) {
    MM_UNROLL
    for (int i = 0; i < kValues; ++i) {
      if constexpr (sizeof(V) == 4) {
        w[i] = as_type<float>(words[i]);
      } else {
        w[i] = float(as_type<vec<V, 2>>(words[i / 2])[i % 2]);
      }
    }
  }
  static METAL_FUNC void unpack(thread const Raw& raw, uint, Codebook, thread Piece<Dense>& p) {
    values(raw.words, p.q);
    p.d = 1.0f;
  }
  static METAL_FUNC void decode16(Row row, uint k, thread float (&w)[16]) {
    MM_UNROLL
    for (int i = 0; i < 16; i += kValues) {
      Raw raw;
      fetch(Storage::start(row, (k + i) / kValues, 0), 0, raw);
      values(raw.words, w + i);
    }
  }
};
using F32 = Dense<float>;
using F16 = Dense<half>;
using BF16 = Dense<bfloat>;

}  // namespace metalmm
