// attention_split: few rows of q against a part of the cache.
//
// Owner    A threadgroup owns a part of the slots and up to 4 rows of q of one head of keys; its 4
//          simdgroups take 2 slots a group of lanes in turn. The lanes of a simdgroup are groups of
//          lanes(fc_k), a power of two; a lane owns 16 values of the slots of its group, and 16
//          sums of values for each row of q.
//                       values  0..15  16..31 ... 112..127     (a head of 128 values)
//            slot t             lane 0 lane 1 ... lane 7
//            slot t + 1         lane 8 ...
//          Every group has a largest score of its own; groups, then simdgroups, are joined at the
//          end.
// Traffic  Keys and values once for up to 4 rows of q. A head of keys with more rows of q has
//          threadgroups side by side that read the same slots, the later ones from the cache.
// Cost     Of a slot and a row of q, by a simdgroup of heads of 128 values: 8 fma, 1 load of q from
//          threadgroup memory, 1.5 shuffles and sums, 1 exponential; of a slot, what decoding 256
//          values costs.
// Needs    4 (fc_k + 2) floats of threadgroup memory for each row of q, 64 + 16 registers for sums
//          and scores.
#pragma once

#include "scores.h"

namespace metalmm {

template <class Format, class T>
struct AttentionSplit {
  using G = AttentionSplitGeometry;

  // What a group of lanes knows of a row of q; a lane has 16 of the sums.
  struct State {
    Total total;
    float sums[kHeadStep];
  };

  // The slots of a simdgroup, and the piece of each that a lane owns.
  struct Walk {
    Row keys, values;  // of slot 0
    long stride;
    uint last;  // no slot from here on
    uint group, groups, lanes;
    uint piece;
    bool owns;  // of the 8 lanes for a head of 80 values, 3 own no piece
  };

  static METAL_FUNC Walk walk(AttentionOperands<T> in, constant KernelArgs& args, uint last,
                              Position at) {
    const uint lanes = G::lanes(fc_k), own = at.lane % lanes, pieces = fc_k / kHeadStep;
    const long head = long(at.tg.z) * args.sequence_stride + long(at.tg.y) * args.head_stride;
    return {in.keys + head, in.values + head,     weight_stride<Format>(args.w_stride),
            last,           at.lane / lanes,      kSimdWidth / lanes,
            lanes,          min(own, pieces - 1), own < pieces};
  }

  // Slot u of a step of the group that begins at `first`; behind the last, that one again.
  static METAL_FUNC uint slot(Walk w, uint first, uint u) {
    return min(first + u * w.groups + w.group, w.last - 1);
  }

  // The 16 values of a lane of every row of q, in threadgroup memory. Rows beyond the last repeat
  // it.
  static METAL_FUNC void load_queries(AttentionOperands<T> in, constant KernelArgs& args,
                                      threadgroup float* queries, uint r0, Position at) {
    const uint lanes = G::lanes(fc_k), rows = rows_of_head(args);
    for (uint i = at.index; i < fc_batch * fc_k; i += G::kThreads) {
      const uint r = i / fc_k, k = i % fc_k;
      const QueryRow row = query_row(args, at.tg.z, at.tg.y, min(r0 + r, rows - 1));
      queries[(r * lanes + k / kHeadStep) * G::kPieceStride + k % kHeadStep] =
          float(in.q[row_of_q(args, row) * fc_k + k]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  static METAL_FUNC float dot(threadgroup const float* q, thread const float (&w)[kHeadStep]) {
    float sum = 0.0f;
    MM_UNROLL
    for (int i = 0; i < kHeadStep / 4; ++i) {
      const float4 v = reinterpret_cast<threadgroup const float4*>(q)[i];
      MM_UNROLL
      for (int j = 0; j < 4; ++j) sum = fma(v[j], w[4 * i + j], sum);
    }
    return sum;
  }

  // Products of the rows with the keys of the group's slots, in every lane of the group.
  static METAL_FUNC void multiply(Walk w, threadgroup const float* queries, uint first,
                                  thread float (&s)[G::kRows][G::kSlots]) {
    MM_UNROLL
    for (uint u = 0; u < G::kSlots; ++u) {
      float key[kHeadStep];
      decode<Format>(w.keys + slot(w, first, u) * w.stride, w.piece * kHeadStep, key);
      MM_UNROLL
      for (uint r = 0; r < G::kRows; ++r) {
        if (r >= fc_batch) continue;
        const float sum = dot(queries + (r * w.lanes + w.piece) * G::kPieceStride, key);
        s[r][u] = w.owns ? sum : 0.0f;
      }
    }
    MM_UNROLL
    for (uint r = 0; r < G::kRows; ++r) {
      if (r >= fc_batch) continue;
      MM_UNROLL
      for (uint u = 0; u < G::kSlots; ++u) {
        for (uint o = 1; o < w.lanes; o *= 2) s[r][u] += simd_shuffle_xor(s[r][u], ushort(o));
      }
    }
  }

  // Scores become weights; sums and total of the row are those of the new largest score.
  static METAL_FUNC void weigh(Walk w, constant KernelArgs& args, Scores row, uint first,
                               thread float (&s)[G::kSlots], thread State& state) {
    float top = state.total.top;
    MM_UNROLL
    for (uint u = 0; u < G::kSlots; ++u) {
      const bool is_last = first + u * w.groups + w.group >= w.last;
      s[u] = is_last ? -INFINITY : Scores::finish(row, args, slot(w, first, u), s[u]);
      top = max(top, s[u]);
    }
    const float factor = weight_of(state.total.top, top);
    float sum = 0.0f;
    MM_UNROLL
    for (uint u = 0; u < G::kSlots; ++u) {
      s[u] = weight_of(s[u], top);
      sum += s[u];
    }
    state.total = {top, fma(state.total.sum, factor, sum)};
    if (factor == 1.0f) return;  // the largest score is seldom a new one
    MM_UNROLL
    for (int i = 0; i < kHeadStep; ++i) state.sums[i] *= factor;
  }

  static METAL_FUNC void add_values(Walk w, uint first,
                                    thread const float (&p)[G::kRows][G::kSlots],
                                    thread State (&rows)[G::kRows]) {
    MM_UNROLL
    for (uint u = 0; u < G::kSlots; ++u) {
      float value[kHeadStep];
      decode<Format>(w.values + slot(w, first, u) * w.stride, w.piece * kHeadStep, value);
      if (first + u * w.groups + w.group >= w.last) {  // of weight 0, which Inf would make NaN
        MM_UNROLL
        for (int i = 0; i < kHeadStep; ++i) value[i] = 0.0f;
      }
      MM_UNROLL
      for (uint r = 0; r < G::kRows; ++r) {
        if (r >= fc_batch) continue;
        MM_UNROLL
        for (int i = 0; i < kHeadStep; ++i) {
          rows[r].sums[i] = fma(p[r][u], value[i], rows[r].sums[i]);
        }
      }
    }
  }

  // The groups of a simdgroup as one: every lane has the total, and its 16 sums.
  static METAL_FUNC void join_groups(Walk w, thread State& row) {
    const float own = row.total.top;
    float top = own;
    for (uint o = w.lanes; o < kSimdWidth; o *= 2) top = max(top, simd_shuffle_xor(top, ushort(o)));
    const float factor = weight_of(own, top);
    row.total = {top, row.total.sum * factor};
    MM_UNROLL
    for (int i = 0; i < kHeadStep; ++i) row.sums[i] *= factor;
    for (uint o = w.lanes; o < kSimdWidth; o *= 2) {
      row.total.sum += simd_shuffle_xor(row.total.sum, ushort(o));
      MM_UNROLL
      for (int i = 0; i < kHeadStep; ++i) row.sums[i] += simd_shuffle_xor(row.sums[i], ushort(o));
    }
  }

  // Row r of simdgroup s in threadgroup memory: fc_k sums, largest score, sum of weights.
  static METAL_FUNC threadgroup float* joint(threadgroup float* memory, uint s, uint r) {
    return memory + (s * fc_batch + r) * (fc_k + 2);
  }

  static METAL_FUNC void share(Walk w, thread const State (&rows)[G::kRows],
                               threadgroup float* memory, uint sg) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the queries are read
    MM_UNROLL
    for (uint r = 0; r < G::kRows; ++r) {
      if (r >= fc_batch || w.group != 0 || !w.owns) continue;
      threadgroup float* to = joint(memory, sg, r);
      MM_UNROLL
      for (int i = 0; i < kHeadStep; ++i) to[w.piece * kHeadStep + i] = rows[r].sums[i];
      if (w.piece == 0) {
        to[fc_k] = rows[r].total.top;
        to[fc_k + 1] = rows[r].total.sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  static METAL_FUNC void store(AttentionResult<T> result, constant KernelArgs& args,
                               threadgroup float* memory, uint r0, uint part, Position at) {
    const uint rows = min(fc_batch, rows_of_head(args) - r0);
    for (uint i = at.index; i < rows * fc_k; i += G::kThreads) {
      const uint r = i / fc_k, d = i % fc_k;
      Total all = {-INFINITY, 0.0f};
      for (uint s = 0; s < G::kSimdgroups; ++s) {
        threadgroup const float* from = joint(memory, s, r) + fc_k;
        all = joined(all, {from[0], from[1]});
      }
      float sum = 0.0f;
      for (uint s = 0; s < G::kSimdgroups; ++s) {
        threadgroup const float* from = joint(memory, s, r);
        sum = fma(from[d], weight_of(from[fc_k], all.top), sum);
      }
      const QueryRow row = query_row(args, at.tg.z, at.tg.y, r0 + r);
      AttentionResult<T>::store(result, args, row, part, d, sum, all);
    }
  }

  static METAL_FUNC void run(AttentionOperands<T> in, device T* y, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    threadgroup float* floats = reinterpret_cast<threadgroup float*>(memory);
    const uint rows = rows_of_head(args), row_groups = (rows + fc_batch - 1) / fc_batch;
    const uint part = at.tg.x / row_groups, r0 = at.tg.x % row_groups * fc_batch;
    load_queries(in, args, floats, r0, at);
    const uint filled = filled_slots(in.length, args);
    const Span span = slots_of_part(args, filled, part);
    const Walk w = walk(in, args, span.last, at);
    State states[G::kRows];
    Scores scores[G::kRows];
    MM_UNROLL
    for (uint r = 0; r < G::kRows; ++r) {
      if (r >= fc_batch) continue;
      states[r] = {{-INFINITY, 0.0f}, {}};
      const QueryRow row = query_row(args, at.tg.z, at.tg.y, min(r0 + r, rows - 1));
      scores[r] = Scores::of_row(in, args, filled, row);
    }
    const uint step = G::kSlots * w.groups;
    for (uint t = span.first + at.sg * step; t < span.last; t += G::kSimdgroups * step) {
      float s[G::kRows][G::kSlots];
      multiply(w, floats, t, s);
      MM_UNROLL
      for (uint r = 0; r < G::kRows; ++r) {
        if (r < fc_batch) weigh(w, args, scores[r], t, s[r], states[r]);
      }
      add_values(w, t, s, states);
    }
    MM_UNROLL
    for (uint r = 0; r < G::kRows; ++r) {
      if (r < fc_batch) join_groups(w, states[r]);
    }
    share(w, states, floats, at.sg);
    store({y, in.sinks}, args, floats, r0, part, at);
  }
};

}  // namespace metalmm
