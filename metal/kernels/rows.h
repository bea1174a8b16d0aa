// Rows of W decoded: all of them, or those that ids name.
//
// Owner    a thread owns 16 values of a row.
// Traffic  every byte of the rows once, every result once, in vectors where K allows.
// Needs    y aligned to 4 of its elements where K is a multiple of 4.
#pragma once

#include "../tile/load.h"

namespace metalmm {

template <class Format, class T>
METAL_FUNC void decode_to(typename Format::Row row, uint k, device T* y) {
  float w[16];
  load_weights<Format>(row, k, fc_k, w);
  if (fc_k % 4 == 0 && (!has_k_tail() || k + 16 <= fc_k)) {
    MM_UNROLL
    for (int i = 0; i < 16; i += 4) {
      vec<T, 4> v;
      MM_UNROLL
      for (int j = 0; j < 4; ++j) v[j] = T(w[i + j]);
      *(device vec<T, 4>*)(y + i) = v;
    }
  } else {
    MM_UNROLL
    for (uint i = 0; i < 16; ++i) {
      if (k + i < fc_k) y[i] = T(w[i]);
    }
  }
}

// The row and the first value of K of a thread.
struct RowItem {
  uint row, k;
};
METAL_FUNC RowItem row_item(Position at) {
  const uint item = at.tg.x * DecodeItems::kThreads + at.index;
  const uint items = (fc_k + DecodeItems::kValues - 1) / DecodeItems::kValues;
  return {item / items, item % items * DecodeItems::kValues};
}

// y[n, k] = W[n, k].
template <class Format, class T>
struct Dequantize {
  static METAL_FUNC void run(device const uchar* weight, device T* y, constant KernelArgs& args,
                             Position at) {
    const RowItem item = row_item(at);
    if (item.row >= args.n) return;
    const typename Format::Row row = Format::row(weight + (long)item.row * args.w_stride, args);
    decode_to<Format>(row, item.k, y + (long)item.row * args.y_stride + item.k);
  }
};

// y[i, k] = W[ids[i], k]. The host has checked the ids; one out of range reads the nearest row.
template <class Format, class T>
struct Embedding {
  static METAL_FUNC void run(device const long* ids, device const uchar* weight, device T* y,
                             constant KernelArgs& args, Position at) {
    const RowItem item = row_item(at);
    if (item.row >= args.count) return;
    const long id = clamp(ids[item.row], 0L, (long)args.n - 1);
    const typename Format::Row row = Format::row(weight + id * args.w_stride, args);
    decode_to<Format>(row, item.k, y + (long)item.row * args.y_stride + item.k);
  }
};

}  // namespace metalmm
