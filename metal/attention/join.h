// attention_join: the parts of every row of q as one result.
//
// Owner    a threadgroup owns a row of q; a thread every 128th of its values.
// Traffic  the sums of all parts that saw a slot once, their totals once a thread.
// Needs    a float of threadgroup memory a part, one barrier.
#pragma once

#include "scores.h"

namespace metalmm {

template <class T>
struct AttentionJoin {
  using G = AttentionJoinGeometry;

  static METAL_FUNC void run(device const float* partial, device const T* sinks, device T* y,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    const Partials p = Partials::at(const_cast<device float*>(partial), args);
    const ulong row = at.tg.x;
    const uint query = row % args.positions, head = row / args.positions % args.heads;
    const QueryRow to = {uint(row / args.positions / args.heads), head, query};
    threadgroup float* factors = reinterpret_cast<threadgroup float*>(memory);
    Total all = {-INFINITY, 0.0f};
    for (uint i = 0; i < args.parts; ++i) {
      const float2 part = *Partials::total_of(p, row, i);
      all = joined(all, {part.x, part.y});
    }
    for (uint i = at.index; i < args.parts; i += G::kThreads) {
      const float2 part = *Partials::total_of(p, row, i);
      factors[i] = part.x == -INFINITY && part.y == 0.0f ? 0.0f : weight_of(part.x, all.top);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Total total = with_sink(all, sinks, head);
    for (uint d = at.index; d < fc_k; d += G::kThreads) {
      float sum = 0.0f;
      for (uint i = 0; i < args.parts; ++i) {
        if (factors[i] == 0.0f) continue;  // it saw nothing, and may be most of the parts
        sum = fma(factors[i], Partials::sums_of(p, row, i)[d], sum);
      }
      y[row_of_y(args, to) * fc_k + d] = T(quotient(sum, all.top, total));
    }
  }
};

}  // namespace metalmm
