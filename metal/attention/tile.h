// attention_tile: many rows of q against the cache, by 8 x 8 matrices.
//
// Owner    A threadgroup owns 32 rows of q of one head of keys, a simdgroup 8 of them: their scores
//          with 32 slots in 4 matrices, and fc_k / 8 matrices of sums of values, in registers. The
//          threads decode 64 values of each of 32 slots at a time into threadgroup memory.
//          A matrix of weights is multiplied as it is: the lanes that hold a row of the scores hold
//          the same row of the left operand.
// Traffic  Keys and values once for 32 rows of q, but for the slots that none of them sees; rows of
//          q once per 32 slots, from the cache.
// Cost     For 32 slots, 32 rows and 8 values, by a simdgroup: 1 + 4 matrices loaded and
//          4 multiplied for the scores, as many for the sums. A weight takes an exponential, a
//          slot the decoding of 2 fc_k values over 128 threads.
// Needs    (32 + 32) rows of 72 operands of threadgroup memory; half operands for f16 q,
//          which round keys, values and weights to 11 bits, else float ones.
#pragma once

#include "../formats/dense.h"
#include "../tile/mma.h"
#include "scores.h"

namespace metalmm {

// Keys are of the values' format, or f16, as for attention_split.
template <class ValueFormat, class T>
struct AttentionTile {
  using G = AttentionTileGeometry;
  using E = typename MatrixOperand<T>::type;
  using Matrix = simdgroup_matrix<E, kFragment, kFragment>;
  MM_CONST int kStride = G::kStep + kOperandPad, kLoaders = G::kStep / kHeadStep;
  MM_CONST int kColumns = G::kSlots / kFragment, kMostSums = kMaxHeadValues / kFragment;

  // The rows of q of a threadgroup. A lane has two of a simdgroup's 8 x 8 scores, of one row.
  struct Rows {
    uint first, count;  // rows of the threadgroup, among those of the head of keys
    Scores scores;      // scores of the lane's row
    Total total;        // total of its slots; the sum without those of other lanes
  };

  // Keys or values: the rows of slot 0, and of slot t.
  struct Cached {
    Row first, at;
  };

  // 64 values of each of kSlots rows of the cache from slot t on, zero behind the last slot.
  template <class Format>
  static METAL_FUNC void load_slots(Cached rows, long stride, Slots places, threadgroup E* operands,
                                    uint t, uint last, uint k0, Position at) {
    for (uint i = at.index; i < uint(G::kSlots * kLoaders); i += G::kThreads) {
      const uint line = i / kLoaders, k = i % kLoaders * kHeadStep;
      E w[kHeadStep];
      if (t + line < last && k0 + k < fc_k) {
        const Row row = fc_epilogue & kAttentionPages
                            ? rows.first + Slots::place(places, t + line) * stride
                            : rows.at + line * uint(stride);
        decode<Format>(row, k0 + k, w);
      } else {
        MM_UNROLL
        for (int j = 0; j < kHeadStep; ++j) w[j] = E(0.0f);
      }
      store_operands(operands + line * kStride + k, w);
    }
  }

  // 64 values of each of the rows of q; those beyond the last repeat it.
  static METAL_FUNC void load_queries(AttentionOperands<T> in, constant KernelArgs& args,
                                      threadgroup E* operands, uint first, uint count, uint k0,
                                      Position at) {
    for (uint i = at.index; i < uint(G::kRows * kLoaders); i += G::kThreads) {
      const uint line = i / kLoaders, k = i % kLoaders * kHeadStep;
      const ulong row = row_of_q(args, at, min(first + line, count - 1));
      device const T* from = in.q + row * fc_k + k0 + k;
      E q[kHeadStep];
      MM_UNROLL
      for (int j = 0; j < kHeadStep; ++j) q[j] = E(0.0f);
      if (k0 + k < fc_k) load_x(from, 0, kHeadStep, q);
      store_operands(operands + line * kStride + k, q);
    }
  }

  // Scores become weights, in place; the factor of all earlier sums of the lane's row.
  static METAL_FUNC float weigh(thread Rows& rows, constant KernelArgs& args, uint t, uint last,
                                uint lane, thread simdgroup_float8x8 (&s)[1][kColumns]) {
    float top = rows.total.top;
    MM_UNROLL
    for (uint j = 0; j < kColumns; ++j) {
      MM_UNROLL
      for (uint e = 0; e < 2; ++e) {
        const uint slot = t + j * kFragment + fragment_column(lane) + e;
        const float product = s[0][j].thread_elements()[e];
        const float score =
            slot < last ? Scores::finish(rows.scores, args, slot, product) : -INFINITY;
        s[0][j].thread_elements()[e] = score;
        top = max(top, score);
      }
    }
    top = max(top, simd_shuffle_xor(top, ushort(1)));
    top = max(top, simd_shuffle_xor(top, ushort(8)));
    const float factor = weight_of(rows.total.top, top);
    float sum = rows.total.sum * factor;
    MM_UNROLL
    for (uint j = 0; j < kColumns; ++j) {
      MM_UNROLL
      for (uint e = 0; e < 2; ++e) {
        const float weight = weight_of(s[0][j].thread_elements()[e], top);
        s[0][j].thread_elements()[e] = weight;
        sum += weight;
      }
    }
    rows.total = {top, sum};
    return factor;
  }

  // Products of the rows with the keys of 32 slots.
  static METAL_FUNC void multiply_keys(AttentionOperands<T> in, Cached keys,
                                       constant KernelArgs& args, threadgroup E* slots, Rows rows,
                                       uint t, uint last, Position at,
                                       thread simdgroup_float8x8 (&s)[1][kColumns]) {
    threadgroup E* queries = slots + G::kSlots * kStride;
    const Slots places = Slots::of(in, args, sequence_of(args, at));
    clear(s);
    for (uint k = 0; k < fc_k; k += G::kStep) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the slots before are read
      if (fc_epilogue & kAttentionHalfKeys) {
        load_slots<F16>(keys, weight_stride<F16>(args.w_stride), places, slots, t, last, k, at);
      } else {
        load_slots<ValueFormat>(keys, weight_stride<ValueFormat>(args.w_stride), places, slots, t,
                                last, k, at);
      }
      load_queries(in, args, queries, rows.first, rows.count, k, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply<G::kStep>(queries + at.sg * kFragment * kStride, slots, s);
    }
  }

  // sums = factor sums + weights * values of 32 slots.
  static METAL_FUNC void add_values(AttentionOperands<T> in, Cached values,
                                    constant KernelArgs& args, threadgroup E* slots, uint t,
                                    uint last, Position at, float factor,
                                    thread simdgroup_float8x8 (&s)[1][kColumns],
                                    thread simdgroup_float8x8 (&sums)[kMostSums]) {
    Matrix weights[kColumns];
    MM_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      MM_UNROLL
      for (int e = 0; e < 2; ++e) {
        weights[j].thread_elements()[e] = E(s[0][j].thread_elements()[e]);
      }
    }
    MM_UNROLL
    for (uint k = 0; k < uint(kMaxHeadValues); k += G::kStep) {
      if (k >= fc_k) continue;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_slots<ValueFormat>(values, weight_stride<ValueFormat>(args.w2_stride),
                              Slots::of(in, args, sequence_of(args, at)), slots, t, last, k, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      MM_UNROLL
      for (uint i = 0; i < uint(G::kStep / kFragment); ++i) {
        if (k + i * kFragment >= fc_k) continue;
        thread simdgroup_float8x8& sum = sums[k / kFragment + i];
        sum.thread_elements()[0] *= factor;
        sum.thread_elements()[1] *= factor;
        MM_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          Matrix value;
          simdgroup_load(value, slots + j * kFragment * kStride + i * kFragment, kStride);
          simdgroup_multiply_accumulate(sum, weights[j], value, sum);
        }
      }
    }
  }

  static METAL_FUNC void store(AttentionResult<T> result, constant KernelArgs& args, Rows rows,
                               uint part, Position at,
                               thread simdgroup_float8x8 (&sums)[kMostSums]) {
    rows.total.sum += simd_shuffle_xor(rows.total.sum, ushort(1));
    rows.total.sum += simd_shuffle_xor(rows.total.sum, ushort(8));
    const uint r = rows.first + at.sg * kFragment + fragment_row(at.lane);
    const QueryRow row = query_row(args, at, min(r, rows.count - 1));
    MM_UNROLL
    for (uint i = 0; i < uint(kMostSums); ++i) {
      if (i * kFragment >= fc_k) continue;
      const float left = sums[i].thread_elements()[0], right = sums[i].thread_elements()[1];
      const uint d = i * kFragment + fragment_column(at.lane);
      if (r >= rows.count) continue;
      AttentionResult<T>::store(result, args, row, part, d, left, rows.total);
      AttentionResult<T>::store(result, args, row, part, d + 1, right, rows.total);
    }
  }

  // The slots of a part that the queries of a threadgroup's rows see: queries of one head of q are
  // neighbours, those of several heads are all queries.
  static METAL_FUNC Span seen_by_rows(constant KernelArgs& args, uint filled, uint first, uint last,
                                      Span part) {
    const uint queries = queries_of(args);
    const bool is_one_head = first / queries == last / queries;
    const uint q0 = is_one_head ? first % queries : 0;
    const uint q1 = is_one_head ? last % queries : queries - 1;
    return {max(part.first, seen_by(args, filled, q0).first),
            min(part.last, seen_by(args, filled, q1).last)};
  }

  static METAL_FUNC void run(AttentionOperands<T> in, device T* y, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    threadgroup E* slots = reinterpret_cast<threadgroup E*>(memory);
    const uint count = rows_of_head(args), tiles = (count + G::kRows - 1) / G::kRows;
    const uint part = at.tg.x / tiles, first = at.tg.x % tiles * G::kRows;
    const uint filled = filled_slots(in.length, args, at);
    const Span span = seen_by_rows(args, filled, first, min(first + G::kRows, count) - 1,
                                   slots_of_part(args, filled, part));
    const uint own = min(first + at.sg * kFragment + fragment_row(at.lane), count - 1);
    const QueryRow row = query_row(args, at, own);
    Rows rows = {first, count, Scores::of_row(in, args, filled, row), {-INFINITY, 0.0f}};
    const long sequence = sequence_of(args, at), head = at.tg.y;
    Cached keys, values;
    keys.first = in.keys + (sequence * args.sequence_stride + head * args.head_stride);
    values.first = in.values + (sequence * args.sequence2_stride + head * args.head2_stride);
    keys.at = keys.first + span.first * args.w_stride;
    values.at = values.first + span.first * args.w2_stride;

    simdgroup_float8x8 sums[kMostSums];
    MM_UNROLL
    for (int i = 0; i < kMostSums; ++i) {
      sums[i] = make_filled_simdgroup_matrix<float, kFragment, kFragment>(0.0f);
    }
    for (uint t = span.first; t < span.last; t += G::kSlots) {
      simdgroup_float8x8 s[1][kColumns];
      multiply_keys(in, keys, args, slots, rows, t, span.last, at, s);
      const float factor = weigh(rows, args, t, span.last, at.lane, s);
      add_values(in, values, args, slots, t, span.last, at, factor, s, sums);
      keys.at += G::kSlots * args.w_stride;
      values.at += G::kSlots * args.w2_stride;
    }
    store({y, in.sinks}, args, rows, part, at, sums);
  }
};

}  // namespace metalmm
