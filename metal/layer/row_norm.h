// The RMS norm of rows, as passes of their own.
#pragma once

#include <metal_simdgroup>

#include "../tile/load.h"
#include "activation.h"
#include "norm.h"

namespace metalmm {

// kCount values of a row, of which a thread owns those kStep apart; inside(at) of them are of the
// row.
template <class T>
struct RowValues {
  MM_CONST uint kCount = 16 / sizeof(T), kStep = NormGeometry::kThreads * kCount;

  static METAL_FUNC uint inside(uint at) { return has_k_tail() ? min(kCount, fc_k - at) : kCount; }

  // Zero beyond the row.
  static METAL_FUNC void load(device const T* row, uint at, thread float (&v)[kCount]) {
    load_x(row, at, fc_k, v);
  }
  static METAL_FUNC void store(device T* row, uint at, thread const float (&v)[kCount]) {
    if (x_is_aligned() && inside(at) == kCount) {
      *reinterpret_cast<device uint4*>(row + at) = packed<T>(v);
      return;
    }
    MM_UNROLL
    for (uint i = 0; i < kCount; ++i) {
      if (i < inside(at)) row[at + i] = T(v[i]);
    }
  }
};

// The sum over the threadgroup of what the threads hold, in every thread.
METAL_FUNC float sum_threads(float mine, threadgroup float* sums, Position at) {
  mine = simd_sum(mine);
  if (at.lane == 0) sums[at.sg] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = sums[0];
  for (int s = 1; s < NormGeometry::kThreads / kSimdWidth; ++s) sum += sums[s];
  return sum;
}

// y[m, :] = the norm of x[m, :] with row m % heads of the weight, times silu(gate[m, :]) where
// there is a gate, + beta c[m, :]; rounded once.
//
// Owner    a threadgroup owns a row; a thread every kThreads-th 16 bytes of it.
// Traffic  x twice, the second time from the cache; weight, gate, c and y once.
// Needs    a float of threadgroup memory per simdgroup, one barrier.
template <class T>
struct RmsNorm {
  using Values = RowValues<T>;
  MM_CONST uint kCount = Values::kCount;

  // y = scale * row * (offset + weight) * silu(gate) + beta c
  static METAL_FUNC void write(device const T* row, device const T* gate, device const T* weight,
                               device const T* c, device T* y, constant KernelArgs& args,
                               float scale, uint index) {
    for (uint k = index * kCount; k < fc_k; k += Values::kStep) {
      float v[kCount], other[kCount];
      Values::load(row, k, v);
      MM_UNROLL
      for (uint i = 0; i < kCount; ++i) v[i] *= scale;
      if (norm_has_weight()) {
        Values::load(weight, k, other);
        MM_UNROLL
        for (uint i = 0; i < kCount; ++i) v[i] *= norm_factor(other[i], args.offset);
      }
      if (fc_epilogue & kNormGate) {
        Values::load(gate, k, other);
        MM_UNROLL
        for (uint i = 0; i < kCount; ++i) v[i] *= silu(other[i]);
      }
      if (fc_epilogue & kEpilogueC) {
        Values::load(c, k, other);
        MM_UNROLL
        for (uint i = 0; i < kCount; ++i) v[i] = fma(args.beta, other[i], v[i]);
      }
      Values::store(y, k, v);
    }
  }

  static METAL_FUNC void run(device const T* x, device const T* gate, device const T* weight,
                             device const T* c, device T* y, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const ulong m = at.tg.x;
    device const T* row = x + m * args.x_stride;
    float squares = 0.0f;
    for (uint k = at.index * kCount; k < fc_k; k += Values::kStep) {
      float v[kCount];
      Values::load(row, k, v);
      squares = add_squares(v, squares);
    }
    squares = sum_threads(squares, reinterpret_cast<threadgroup float*>(memory), at);
    const ulong to = m * args.y_stride;
    const float scale = norm_scale(squares, args.eps);
    weight += m % args.heads * fc_k;
    write(row, gate + m * args.x2_stride, weight, c + to, y + to, args, scale, at.index);
  }
};

// sum = x + x2, rounded, and y = the norm of that.
//
// Owner    as rms_norm.
// Traffic  x, x2, weight and y once, sum twice: the second time from the cache.
// Needs    as rms_norm.
template <class T>
struct AddRmsNorm {
  using Values = RowValues<T>;
  MM_CONST uint kCount = Values::kCount;

  static METAL_FUNC void run(device const T* x, device const T* x2, device const T* weight,
                             device T* y, device T* sum, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const ulong m = at.tg.x, to = m * args.y_stride;
    device const T *row = x + m * args.x_stride, *row2 = x2 + m * args.x2_stride;
    float squares = 0.0f;
    for (uint k = at.index * kCount; k < fc_k; k += Values::kStep) {
      float v[kCount], other[kCount];
      Values::load(row, k, v);
      Values::load(row2, k, other);
      MM_UNROLL
      for (uint i = 0; i < kCount; ++i) v[i] = float(T(v[i] + other[i]));
      Values::store(sum + to, k, v);
      squares = add_squares(v, squares);
    }
    squares = sum_threads(squares, reinterpret_cast<threadgroup float*>(memory), at);
    // A thread reads of the sums what it wrote.
    const float scale = norm_scale(squares, args.eps);
    RmsNorm<T>::write(sum + to, y, weight, y, y + to, args, scale, at.index);
  }
};

}  // namespace metalmm
