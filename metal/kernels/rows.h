// Rows of W decoded: all of them, or those that ids name.
//
// Owner    a thread owns 16 values of a row.
// Traffic  every byte of the rows once, every result once, in vectors where K allows.
// Needs    y aligned to 16 bytes where its rows are whole numbers of them.
#pragma once

#include "../tile/load.h"

namespace metalmm {

// The row and the first value of K of a thread, and whether there is such a row: threads beyond the
// last one decode it again, since their neighbours exchange values with them.
struct RowItem {
  uint row, k;
  bool inside;
};
METAL_FUNC RowItem row_item(Position at, uint rows) {
  const uint item = at.tg.x * DecodeItems::kThreads + at.index;
  const uint items = (fc_k + DecodeItems::kValues - 1) / DecodeItems::kValues;
  const uint row = item / items;
  return {min(row, rows - 1), item % items * DecodeItems::kValues, row < rows};
}

// Stores the values of a lane and those of its neighbour, which follow each other where rows are
// whole pairs of items: an even lane has an even item. Both write the halves of the same 32 bytes
// at once; apart, each is a write of its own to a cache that knows sectors of 32 bytes. (H200,
// dequantize q4_0, 14336 x 4096: 61 us apart, 43 together.)
static_assert(DecodeItems::kValues == 16 && DecodeItems::kThreads % 2 == 0, "pairs of lanes");
template <class T, class V>
METAL_FUNC void store_pairs(device T* y, thread const V (&w)[16], uint lane, bool inside) {
  constexpr uint kVector = 16 / sizeof(T);
  const bool odd = lane % 2 != 0;
  device T* to = odd ? y - 16 + kVector : y;
  MM_UNROLL
  for (uint i = 0; i < 16; i += 2 * kVector) {
    const uint4 first = packed<T>(w + i), second = packed<T>(w + i + kVector);
    const uint4 taken = simd_shuffle_xor(odd ? first : second, 1);
    if (inside) {
      *reinterpret_cast<device uint4*>(to + i) = odd ? taken : first;
      *reinterpret_cast<device uint4*>(to + i + 16) = odd ? second : taken;
    }
  }
}

template <class T, class V>
METAL_FUNC void store_item(RowItem item, thread const V (&w)[16], device T* y, uint lane) {
  constexpr uint kVector = 16 / sizeof(T);
  if (fc_k % (2 * DecodeItems::kValues) == 0) {
    store_pairs(y, w, lane, item.inside);
  } else if (item.inside && fc_k % kVector == 0 && item.k + 16 <= fc_k) {
    MM_UNROLL
    for (uint i = 0; i < 16; i += kVector)
      *reinterpret_cast<device uint4*>(y + i) = packed<T>(w + i);
  } else if (item.inside) {
    MM_UNROLL
    for (uint i = 0; i < 16; ++i) {
      if (item.k + i < fc_k) y[i] = T(w[i]);
    }
  }
}

template <class Format, class T>
using Decoded = conditional_t<Format::kHalvesAreExact, typename MatrixOperand<T>::type, float>;

// y[n, k] = W[n, k].
template <class Format, class T>
struct Dequantize {
  static METAL_FUNC void run(device const uchar* weight, device T* y, constant KernelArgs& args,
                             Position at) {
    const RowItem item = row_item(at, args.n);
    const Row row = weight + (long)item.row * weight_stride<Format>(args.w_stride);
    Decoded<Format, T> w[16];
    load_weights<Format>(row, item.k, fc_k, w);
    store_item(item, w, y + (long)item.row * args.y_stride + item.k, at.lane);
  }
};

// y[i, k] = W[ids[i], k], rounded, times a scale where there is one. No ids on a device are
// checked: one out of range reads the nearest row.
template <class Format, class T>
struct Embedding {
  static METAL_FUNC void run(device const long* ids, device const uchar* weight,
                             device const T* scale, device T* y, constant KernelArgs& args,
                             Position at) {
    const RowItem item = row_item(at, args.count);
    const long id = clamp(ids[item.row], 0L, (long)args.n - 1);
    const Row row = weight + id * weight_stride<Format>(args.w_stride);
    y += (long)item.row * args.y_stride + item.k;
    Decoded<Format, T> w[16];
    load_weights<Format>(row, item.k, fc_k, w);
    if (!(fc_epilogue & kRowScale)) {
      store_item(item, w, y, at.lane);
      return;
    }
    const long number = fc_epilogue & kRowScales ? id : 0;
    const float factor = fc_epilogue & kRowFloatScale
                             ? reinterpret_cast<device const float*>(scale)[number]
                             : float(scale[number]);
    float scaled[16];
    MM_UNROLL
    for (int i = 0; i < 16; ++i) scaled[i] = float(T(w[i])) * factor;
    store_item(item, scaled, y, at.lane);
  }
};

}  // namespace metalmm
