// attention_join: the parts of every row of q as one result.
//
// Owner    A threadgroup owns a row of q. A simdgroup adds every 4th part, 4 values a lane; a
//          thread then adds what the simdgroups have of every 128th value.
// Traffic  The sums of all parts up to the last one with a score, their totals twice a simdgroup.
// Needs    A float of threadgroup memory a part, fc_k floats a simdgroup; two barriers.
#pragma once

#include "scores.h"

namespace metalmm {

template <class T>
struct AttentionJoin {
  using G = AttentionJoinGeometry;

  // The total of all parts, in every lane of every simdgroup; `factors` of the parts, written by
  // the first simdgroup; `count`: parts up to the last one with a score. Parts behind are not read:
  // the cache may be mostly empty. A part before it without a score is added with weight 0, as its
  // slots are where there is one part.
  static METAL_FUNC Total join_totals(Partials p, ulong row, threadgroup float* factors,
                                      thread uint& count, Position at) {
    float top = -INFINITY;
    uint used = 0;
    for (uint i = at.lane; i < p.parts; i += kSimdWidth) {
      const float2 part = *Partials::total_of(p, row, i);
      top = max(top, part.x);
      if (part.x != -INFINITY || part.y != 0.0f) used = i + 1;
    }
    top = simd_max(top);
    count = simd_max(used);
    float sum = 0.0f;
    for (uint i = at.lane; i < count; i += kSimdWidth) {
      const float2 part = *Partials::total_of(p, row, i);
      const float factor = weight_of(part.x, top);
      sum = fma(part.y, factor, sum);
      if (at.sg == 0) factors[i] = factor;
    }
    return {top, simd_sum(sum)};
  }

  // Sums of 4 values of every kSimdgroups-th part. The loads of kLoads parts are under way before
  // the first is used.
  static METAL_FUNC float4 add_parts(Partials p, ulong row, threadgroup const float* factors,
                                     uint count, uint d4, uint sg) {
    float4 sum = 0.0f;
    for (uint first = sg; first < count; first += G::kLoads * G::kSimdgroups) {
      float4 values[G::kLoads];
      float weights[G::kLoads];
      MM_UNROLL
      for (uint j = 0; j < G::kLoads; ++j) {
        const uint i = first + j * G::kSimdgroups, own = min(i, count - 1);
        values[j] = reinterpret_cast<device const float4*>(Partials::sums_of(p, row, own))[d4];
        weights[j] = factors[own];
      }
      MM_UNROLL
      for (uint j = 0; j < G::kLoads; ++j) {
        if (first + j * G::kSimdgroups < count) sum = fma(float4(weights[j]), values[j], sum);
      }
    }
    return sum;
  }

  static METAL_FUNC void run(device const float* partial, device const T* sinks, device T* y,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    const Partials p = Partials::at(const_cast<device float*>(partial), args);
    const ulong row = at.tg.x;
    const uint query = row % args.positions, head = row / args.positions % args.heads;
    const QueryRow to = {uint(row / args.positions / args.heads), head, query};
    threadgroup float* factors = reinterpret_cast<threadgroup float*>(memory + G::kMostSums);
    uint count;
    const Total all = join_totals(p, row, factors, count, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d4 = at.lane; d4 < fc_k / 4; d4 += kSimdWidth) {
      memory[at.sg * (fc_k / 4) + d4] = add_parts(p, row, factors, count, d4, at.sg);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Total total = with_sink(all, sinks, head);
    threadgroup const float* sums = reinterpret_cast<threadgroup const float*>(memory);
    for (uint d = at.index; d < fc_k; d += G::kThreads) {
      float sum = 0.0f;
      MM_UNROLL
      for (uint s = 0; s < G::kSimdgroups; ++s) sum += sums[s * fc_k + d];
      y[row_of_y(args, to) * fc_k + d] = T(quotient(sum, all.top, total));
    }
  }
};

}  // namespace metalmm
