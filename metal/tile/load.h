// Loads: packed rows of W decoded, rows of x converted, into registers or into threadgroup memory.
//
// Operands in threadgroup memory lie in rows of kK, kK + kOperandPad elements apart. Rows beyond N
// or M repeat the last one, whose results are then not stored; values beyond K are zero.
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

// Bytes from a row of W to the next, of which the host says `given`. Packed rows follow each other:
// their distance is a constant.
template <class Format>
METAL_FUNC long weight_stride(long given) {
  return rows_are_packed() ? long(Format::Storage::row_bytes()) : given;
}

// Row n of W, or the last row.
template <class Format>
METAL_FUNC Row weight_row(device const uchar* weight, constant KernelArgs& args, uint n) {
  const uint row = has_n_tail() ? min(n, args.n - 1) : n;
  return weight + long(row) * weight_stride<Format>(args.w_stride);
}

// Row m of x, or the last row.
template <class T>
METAL_FUNC device const T* x_row(device const T* x, constant KernelArgs& args, uint m) {
  const uint row = has_m_tail() ? min(m, args.m - 1) : m;
  return x + long(row) * args.x_stride;
}

template <class Format, class V>
METAL_FUNC void decode(Row row, uint k, thread V (&w)[16]) {
  if constexpr (!is_same<V, float>::value && !Format::kDecodesHalves) {
    float wide[16];
    decode<Format>(row, k, wide);
    MM_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = V(wide[i]);
  } else if constexpr (!Format::Storage::kHasWidths) {
    Format::decode16(row, k, w);
  } else if (has_long_blocks()) {
    Format::template decode16<8>(row, k, w);
  } else if (has_word_blocks()) {
    Format::template decode16<4>(row, k, w);
  } else {
    Format::template decode16<2>(row, k, w);
  }
}

// w[i] = value k + i of a row of W as V, float or half, zero from `end` on. Blocks are never cut,
// but may all lie beyond `end`: only a dense row can end within the 16.
template <class Format, class V>
METAL_FUNC void load_weights(Row row, uint k, uint end, thread V (&w)[16]) {
  if (!has_k_tail() || k + 16 <= end) {
    decode<Format>(row, k, w);
    return;
  }
  MM_UNROLL
  for (uint i = 0; i < 16; ++i) {
    w[i] = V(0.0f);
    if constexpr (Format::Storage::kBlockValues == 1) {
      if (k + i < end) w[i] = V(Format::value(row, k + i));
    }
  }
}

// kCount values at p as E; p is aligned to 16 bytes, or to the size of all of them.
template <int kCount, class E, class T>
METAL_FUNC void load_vectors(device const T* p, thread E (&v)[kCount]) {
  static_assert(kCount % 4 == 0, "whole vectors");
  if constexpr (sizeof(T) == 2 && kCount % 8 == 0) {
    MM_UNROLL
    for (int i = 0; i < kCount / 8; ++i) {
      const uint4 words = reinterpret_cast<device const uint4*>(p)[i];
      MM_UNROLL
      for (int j = 0; j < 8; ++j) v[8 * i + j] = E(as_type<vec<T, 2>>(words[j / 2])[j % 2]);
    }
  } else {
    MM_UNROLL
    for (int i = 0; i < kCount; ++i) {
      v[i] = E(reinterpret_cast<device const vec<T, 4>*>(p)[i / 4][i % 4]);
    }
  }
}

// x[i] = value k + i of a row of x, zero from `end` on; k a multiple of kCount.
template <int kCount, class E, class T>
METAL_FUNC void load_x(device const T* row, uint k, uint end, thread E (&x)[kCount]) {
  if (x_is_aligned() && (!has_k_tail() || k + kCount <= end)) {
    load_vectors(row + k, x);
    return;
  }
  MM_UNROLL
  for (uint i = 0; i < kCount; ++i) {
    x[i] = E(0.0f);
    if (!has_k_tail() || k + i < end) x[i] = E(row[k + i]);
  }
}

// The type that the matrix unit multiplies for x of type T: matrix_operand_bytes says why.
template <class T>
struct MatrixOperand {
  using type = float;
};
template <>
struct MatrixOperand<half> {
  using type = half;
};

// 16 bytes of values as T.
template <class T, class V>
METAL_FUNC uint4 packed(thread const V* v) {
  uint4 words;
  MM_UNROLL
  for (int j = 0; j < 4; ++j) {
    if constexpr (sizeof(T) == 4) {
      words[j] = as_type<uint>(T(v[j]));
    } else {
      vec<T, 2> pair;
      pair.x = T(v[2 * j]);
      pair.y = T(v[2 * j + 1]);
      words[j] = as_type<uint>(pair);
    }
  }
  return words;
}

// to[i] = v[i], rounded to the type of the operands; `to` is aligned to 16 bytes.
template <int kCount, class E, class V>
METAL_FUNC void store_operands(threadgroup E* to, thread const V (&v)[kCount]) {
  constexpr int kVector = 16 / sizeof(E);
  static_assert(kCount % kVector == 0, "whole vectors");
  MM_UNROLL
  for (int i = 0; i < kCount; i += kVector) {
    *reinterpret_cast<threadgroup uint4*>(to + i) = packed<E>(v + i);
  }
}

}  // namespace metalmm
