// y = x op x2, and the dot product: probes of a launcher and of its arithmetic; and act_mul.
#pragma once

#include <metal_simdgroup>

#include "../entry.h"
#include "../layer/activation.h"

namespace metalmm {

struct Add {
  static METAL_FUNC float of(float a, float b) { return a + b; }
};
struct Sub {
  static METAL_FUNC float of(float a, float b) { return a - b; }
};
struct Mul {
  static METAL_FUNC float of(float a, float b) { return a * b; }
};
struct Div {
  static METAL_FUNC float of(float a, float b) { return a / b; }
};

// Owner    a thread owns kValues elements, kThreads apart.
// Traffic  every operand once, neighbouring lanes neighbouring elements.
// Needs    nothing.
template <class Op, class X, class Y>
struct Elementwise {
  static METAL_FUNC void run(device const X* x, device const X* x2, device Y* y,
                             constant KernelArgs& args, Position at) {
    constexpr uint kThreads = ProbeItems::kThreads, kValues = ProbeItems::kValues;
    const ulong first = (ulong)at.tg.x * (kThreads * kValues) + at.index;
    MM_UNROLL
    for (uint j = 0; j < kValues; ++j) {
      const ulong i = first + j * kThreads;
      if (i < args.count) y[i] = Y(Op::of(float(x[i]), float(x2[i])));
    }
  }
};

// y = act(gate) * up of f32 gate and up, or of such as torch's matmul has rounded.
template <class T>
struct GateUp {
  static METAL_FUNC void run(device const float* gate, device const float* up, device T* y,
                             constant KernelArgs& args, Position at) {
    if (fc_epilogue & kActMulRounded) {
      Elementwise<ActMul, T, T>::run(reinterpret_cast<device const T*>(gate),
                                     reinterpret_cast<device const T*>(up), y, args, at);
    } else {
      Elementwise<ActMul, float, T>::run(gate, up, y, args, at);
    }
  }
};

// y[0] = x . x2.
//
// Owner    a thread owns every kThreads-th element; the first one adds the simdgroups in order.
// Traffic  every operand once.
// Needs    one threadgroup, a float of threadgroup memory per simdgroup.
template <class T>
struct Dot {
  static METAL_FUNC void run(device const T* x, device const T* x2, device T* y,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    threadgroup float* sums = reinterpret_cast<threadgroup float*>(memory);
    float acc = 0.0f;
    for (ulong i = at.index; i < args.count; i += DotGeometry::kThreads) {
      acc = fma(float(x[i]), float(x2[i]), acc);
    }
    acc = simd_sum(acc);
    if (at.lane == 0) sums[at.sg] = acc;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index == 0) {
      float sum = sums[0];
      for (int s = 1; s < DotGeometry::kThreads / kSimdWidth; ++s) sum += sums[s];
      y[0] = T(sum);
    }
  }
};

}  // namespace metalmm
