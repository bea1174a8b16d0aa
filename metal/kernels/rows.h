// Rows of W decoded: all of them, or those that ids name.
//
// Owner    a thread owns 16 values of a row.
// Traffic  every byte of the rows once, every result once, in vectors where K allows.
// Needs    y aligned to 16 bytes where its rows are whole numbers of them.
#pragma once

#include "../tile/load.h"

namespace metalmm {

// 16 bytes of results.
METAL_FUNC void store_vector(device float* y, thread const float* w) {
  *(device float4*)y = float4(w[0], w[1], w[2], w[3]);
}
template <class T, class V>
METAL_FUNC void store_vector(device T* y, thread const V* w) {
  uint4 words;
  MM_UNROLL
  for (int j = 0; j < 4; ++j) {
    vec<T, 2> pair;
    pair.x = T(w[2 * j]);
    pair.y = T(w[2 * j + 1]);
    words[j] = as_type<uint>(pair);
  }
  *(device uint4*)y = words;
}

template <class Format, class T>
METAL_FUNC void decode_to(typename Format::Row row, uint k, device T* y) {
  constexpr uint kVector = 16 / sizeof(T);
  typename TileOperand<T>::type w[16];
  load_weights<Format>(row, k, fc_k, w);
  if (fc_k % kVector == 0 && (!has_k_tail() || k + 16 <= fc_k)) {
    MM_UNROLL
    for (uint i = 0; i < 16; i += kVector) store_vector(y + i, w + i);
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
    const typename Format::Row row =
        Format::row(weight + (long)item.row * weight_stride<Format>(args.w_stride), args);
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
    const typename Format::Row row =
        Format::row(weight + id * weight_stride<Format>(args.w_stride), args);
    decode_to<Format>(row, item.k, y + (long)item.row * args.y_stride + item.k);
  }
};

}  // namespace metalmm
