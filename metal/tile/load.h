// Loads: packed rows of W decoded, rows of x converted, into registers or into threadgroup tiles.
//
// A tile is rows of kK operands, kK + kTilePad elements apart. Rows beyond N or M repeat the last
// one, whose results are then not stored; values beyond K are zero.
#pragma once

#include <metal_stdlib>

#include "../formats/format.h"
#include "../geometry.h"

namespace metalmm {

using namespace metal;

// The values of K that a part owns: [begin, end).
struct KRange {
  uint begin, end;
};
METAL_FUNC KRange k_of_part(constant KernelArgs& args, uint part) {
  if ((fc_epilogue & kEpiloguePartial) == 0) return {0, fc_k};
  const uint begin = part * args.k_per_part;
  return {begin, min(begin + args.k_per_part, fc_k)};
}

// Row n of W, or the last row.
template <class Format>
METAL_FUNC typename Format::Row weight_row(device const uchar* weight, constant KernelArgs& args,
                                           uint n) {
  const uint row = has_n_tail() ? min(n, args.n - 1) : n;
  return Format::row(weight + static_cast<long>(row) * args.w_stride, args);
}

// Row m of x, or the last row.
template <class T>
METAL_FUNC device const T* x_row(device const T* x, constant KernelArgs& args, uint m) {
  const uint row = has_m_tail() ? min(m, args.m - 1) : m;
  return x + static_cast<long>(row) * args.x_stride;
}

// w[i] = value k + i of a row of W, zero from `end` on. Blocks are never cut: only a dense row can
// end within the 16.
template <class Format>
METAL_FUNC void load_weights(typename Format::Row row, uint k, uint end, thread float (&w)[16]) {
  if (!has_k_tail() || k + 16 <= end) {
    Format::decode16(row, k, w);
    return;
  }
  MM_UNROLL
  for (uint i = 0; i < 16; ++i) {
    w[i] = 0.0f;
    if constexpr (Format::kBlockValues == 1) {
      if (k + i < end) w[i] = Format::value(row, k + i);
    }
  }
}

// Four neighbours of a row of x that is aligned to four of its elements.
template <class T>
METAL_FUNC float4 load4(device const T* p) {
  return float4(*reinterpret_cast<device const vec<T, 4>*>(p));
}

// x[i] = value k + i of a row of x, zero from `end` on; k a multiple of 4.
template <int kCount, class T>
METAL_FUNC void load_x(device const T* row, uint k, uint end, thread float (&x)[kCount]) {
  if (x_is_aligned() && (!has_k_tail() || k + kCount <= end)) {
    MM_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = load4(row + k + i);
      x[i] = v.x;
      x[i + 1] = v.y;
      x[i + 2] = v.z;
      x[i + 3] = v.w;
    }
    return;
  }
  MM_UNROLL
  for (uint i = 0; i < kCount; ++i) {
    x[i] = !has_k_tail() || k + i < end ? static_cast<float>(row[k + i]) : 0.0f;
  }
}

// What the matrix unit multiplies for activations of type T: tile_operand_bytes says why.
template <class T>
struct TileOperand {
  using type = float;
};
template <>
struct TileOperand<half> {
  using type = half;
};

METAL_FUNC void store4(threadgroup float* to, float4 v) {
  *reinterpret_cast<threadgroup float4*>(to) = v;
}
METAL_FUNC void store4(threadgroup half* to, float4 v) {
  *reinterpret_cast<threadgroup half4*>(to) = half4(v);
}

// to[i] = v[i], rounded to the type of the tile; `to` is aligned to 4 elements.
template <int kCount, class E>
METAL_FUNC void store_operands(threadgroup E* to, thread const float (&v)[kCount]) {
  MM_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    store4(to + i, float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
  }
}

}  // namespace metalmm
