// y[m, n] = the partial results of split-K added in the order of the parts, then the epilogue. With
// no parts y holds the results, which take the epilogue where they lie.
//
// Owner    a thread owns a result.
// Traffic  parts * M * N floats, neighbouring lanes neighbouring floats; or y once.
// Needs    partial f32 [parts, M, N]; without parts y_stride = N.
#pragma once

#include "epilogue.h"

namespace metalmm {

template <class T>
struct SplitReduce {
  static METAL_FUNC void run(device const float* partial, Result<T> result,
                             constant KernelArgs& args, Position at) {
    const uint i = at.tg.x * ResultItems::kThreads + at.index;
    const uint count = args.m * args.n;
    if (i >= count) return;
    float acc = args.parts ? partial[i] : float(result.y[i]);
    for (uint part = 1; part < args.parts; ++part) acc += partial[(ulong)part * count + i];
    store_result(result, args, 0, i / args.n, i % args.n, acc);
  }
};

}  // namespace metalmm
