// attention_split: few rows of q against a part of the cache.
//
// Owner    A threadgroup owns a part of the slots and up to 4 rows of q of one head of keys; its 4
//          simdgroups take steps of 4 slots a group of lanes in turn. The lanes of a simdgroup are
//          groups of lanes_of_slot(), a power of two; a lane owns 8 values of the slots of its
//          group, of the rows of q, and of their sums.
//                       values  0..7   8..15 ... 120..127     (a head of 128 values, not packed)
//            slot t             lane 0 lane 1 ... lane 15
//            slot t + 1         lane 16 ...
//          A lane finishes one of the 16 scores of a group and a step; of 8 lanes each finishes
//          two, of 32 two the same. Every group has a largest score of its own; groups, then
//          simdgroups, are joined at the end.
// Traffic  Keys and values once for up to 4 rows of q. A head of keys with more rows of q has
//          threadgroups side by side that read the same slots, the later ones from the cache.
//          The 4 keys, then the 4 values of a step are under way at once; kAhead: values while
//          keys are multiplied, keys of the next step while values are added.
// Cost     For a slot and a row of q, by a simdgroup of heads of 128 values: 8 fma, half a sum, 1.2
//          shuffles, 2 products with scales and factors, 1/16 exponential; for a slot, what
//          decoding 8 values a lane costs, of keys or of values.
// Needs    4 (fc_k + 2) floats of threadgroup memory for each row of q; of registers 32 for q (f16:
//          16), 32 for sums, 16 for what is under way (kAhead: 32; f32: twice as many).
#pragma once

#include "eight.h"
#include "scores.h"

namespace metalmm {

template <class KeyFormat, class ValueFormat, class T>
struct AttentionSplitOf {
  using G = AttentionSplitGeometry;
  using Keys = Eight<KeyFormat>;
  using Values = Eight<ValueFormat>;
  MM_CONST int kSlots = 4, kRows = G::kRows, kRun = Keys::Layout::kRun;
  // A target of the stand-in. An Apple GPU hides a load behind other simdgroups, of which it holds
  // 512 threads instead of 384 where half as much is under way (f16, by bench agx).
#if defined(MM_ALL_ROWS_AT_ONCE)
  MM_CONST bool kAhead = true;
#else
  MM_CONST bool kAhead = false;
#endif

  // A lane's part of the rows of q: values in the order of keys, or sums of values.
  struct Pieces {
    float v[kRows][8];
  };

  // The slots of a simdgroup, and what of each a lane owns.
  struct Walk {
    Row keys, values;  // rows of slot 0
    long key_stride, value_stride;
    Slots slots;
    uint last;                        // no slot from here on
    uint lane, lanes, group, groups;  // the lane of its group
    uint piece;
    bool owns;  // 6 of the 16 lanes for a head of 80 values do not
  };

  // Lanes of a slot: a power of two. 8 lanes finish two each of the 16 scores of a step.
  static METAL_FUNC uint lanes_of_slot() { return fc_k > 128 ? 32 : fc_k > 64 ? 16 : 8; }
  static METAL_FUNC bool has_two() { return lanes_of_slot() == 8; }

  // Rows that are multiplied: a power of two. A lane counts rows and slots from those whose score
  // it finishes: its row j is row j ^ row_of(lane). Then lane ^ i has as row 0 what is row i here,
  // and a sum over lanes is one of neighbours, without a choice.
  static METAL_FUNC uint lane_rows() { return fc_batch > 2 ? 4 : fc_batch; }
  static METAL_FUNC uint row_of(uint lane, uint j = 0) { return (lane & (lane_rows() - 1)) ^ j; }
  static METAL_FUNC uint slot_of(uint lane, uint u = 0) {
    return (has_two() ? lane / 4 % 2 * 2 : lane / 4 % 4) ^ u;
  }

  static METAL_FUNC Walk walk(AttentionOperands<T> in, constant KernelArgs& args, uint last,
                              Position at) {
    const uint lanes = lanes_of_slot(), own = at.lane % lanes, pieces = fc_k / 8;
    const long sequence = sequence_of(args, at), head = at.tg.y;
    return {in.keys + (sequence * args.sequence_stride + head * args.head_stride),
            in.values + (sequence * args.sequence2_stride + head * args.head2_stride),
            weight_stride<KeyFormat>(args.w_stride),
            weight_stride<ValueFormat>(args.w2_stride),
            Slots::of(in, args, sequence_of(args, at)),
            last,
            own,
            lanes,
            at.lane / lanes,
            kSimdWidth / lanes,
            min(own, pieces - 1),
            own < pieces};
  }

  // Slot u of the lane's 4 of a step, counted from its first, and that or the last slot, which is
  // slot `left` of the step.
  static METAL_FUNC int any_slot(Walk w, uint u) {
    return int(slot_of(w.lane, u) * w.groups + w.group);
  }
  static METAL_FUNC int near_slot(Walk w, int left, uint u) { return min(any_slot(w, u), left); }
  static METAL_FUNC uint slot(Walk w, int left, uint u) {
    return w.last - 1 - left + near_slot(w, left, u);
  }
  static METAL_FUNC bool is_behind(Walk w, int left, uint u) { return any_slot(w, u) > left; }

  // Row r of the head of keys, or the last one.
  static METAL_FUNC QueryRow row_at(constant KernelArgs& args, Position at, uint r) {
    return query_row(args, at, min(r, rows_of_head(args) - 1));
  }

  // The places in pages of the lane's slots of a step.
  struct Places {
    uint at[kSlots];
  };
  static METAL_FUNC Places places(Walk w, int left) {
    Places out;
    MM_UNROLL
    for (uint u = 0; u < kSlots; ++u) out.at[u] = Slots::place(w.slots, slot(w, left, u));
    return out;
  }

  // The slots of a step, whose first has its row `at`.
  template <class Own, bool kPaged>
  static METAL_FUNC void fetch(Walk w, Row rows, Row at, long stride, int left, Places paged,
                               thread typename Own::Raw (&raw)[kSlots]) {
    MM_UNROLL
    for (uint u = 0; u < kSlots; ++u) {
      if (kPaged) {
        raw[u] = Own::fetch(rows + paged.at[u] * stride, 0, 0, w.piece);
      } else if (kAhead) {
        raw[u] = Own::fetch(rows + slot(w, left, u) * stride, 0, 0, w.piece);
      } else {
        raw[u] = Own::fetch(at, near_slot(w, left, u), uint(stride), w.piece);
      }
    }
  }

  // The lane's values of its rows of q; rows beyond the last repeat it.
  static METAL_FUNC void load_queries(AttentionOperands<T> in, constant KernelArgs& args, Walk w,
                                      uint r0, Position at, thread Pieces& q) {
    MM_UNROLL
    for (uint j = 0; j < kRows; ++j) {
      if (j >= lane_rows()) continue;
      const uint r = min(r0 + row_of(w.lane, j), rows_of_head(args) - 1);
      device const T* from = in.q + row_of_q(args, at, r) * fc_k;
      MM_UNROLL
      for (int i = 0; i < 8; i += kRun) {
        float run[kRun];
        load_x(from, Keys::Layout::value(w.piece, i), fc_k, run);
        MM_UNROLL
        for (int n = 0; n < kRun; ++n) q.v[j][i + n] = run[n];
      }
    }
  }

  // Products of the rows with a key: of the lane's row 0, summed over the 4 lanes around.
  static METAL_FUNC float multiply(Walk w, thread const typename Keys::Raw& raw,
                                   thread const Pieces& q) {
    float key[8], s[kRows];
    Keys::unpack(raw, w.piece, key);
    const float scale = Keys::scale(raw);
    MM_UNROLL
    for (uint j = 0; j < kRows; ++j) {
      s[j] = 0.0f;
      if (j >= lane_rows()) continue;
      MM_UNROLL
      for (int i = 0; i < 8; ++i) s[j] = i == 0 ? q.v[j][0] * key[0] : fma(q.v[j][i], key[i], s[j]);
      s[j] *= scale;
      if (fc_k / 8 != lanes_of_slot() && !w.owns) s[j] = 0.0f;
    }
    float others = s[0], upper = s[2];
    if (lane_rows() > 1) others = s[1];
    s[0] += simd_shuffle_xor(others, ushort(1));
    if (lane_rows() > 2) {
      upper += simd_shuffle_xor(s[3], ushort(1));
    } else {
      upper = s[0];
    }
    return s[0] + simd_shuffle_xor(upper, ushort(2));
  }

  // The lane's scores: of its row 0 and its slot 0, where lanes are few of its slot 1, too.
  static METAL_FUNC void add_up(thread const float (&s)[kSlots], thread float (&own)[2]) {
    if (has_two()) {
      own[0] = s[0] + simd_shuffle_xor(s[2], ushort(4));
      own[1] = s[1] + simd_shuffle_xor(s[3], ushort(4));
      return;
    }
    own[0] = s[0] + simd_shuffle_xor(s[1], ushort(4));
    own[1] = s[2] + simd_shuffle_xor(s[3], ushort(4));
    own[0] += simd_shuffle_xor(own[1], ushort(8));
    if (lanes_of_slot() > 16) own[0] += simd_shuffle_xor(own[0], ushort(16));
  }

  // The value of this lane's slot u and row j, from the lane that has it.
  static METAL_FUNC float of_slot(thread const float (&own)[2], uint u, uint j) {
    return has_two() ? simd_shuffle_xor(own[u % 2], ushort(j | u / 2 * 4))
                     : simd_shuffle_xor(own[0], ushort(j | u * 4));
  }

  // Scores become weights; sums and total those of the new largest score. Rejected: sums scaled
  // only where some lane's largest score has grown, which takes 10 registers more for 34
  // instructions of 543.
  static METAL_FUNC void weigh(Walk w, constant KernelArgs& args, Scores row, int left,
                               thread float (&own)[2], thread Total& total, thread Pieces& sums) {
    const uint count = has_two() ? 2 : 1;
    float top = -INFINITY;
    MM_UNROLL
    for (uint u = 0; u < 2; ++u) {
      if (u >= count) continue;
      own[u] =
          is_behind(w, left, u) ? -INFINITY : Scores::finish(row, args, slot(w, left, u), own[u]);
      top = max(top, own[u]);
    }
    top = max(top, simd_shuffle_xor(top, ushort(4)));
    if (!has_two()) top = max(top, simd_shuffle_xor(top, ushort(8)));
    top = max(total.top, top);
    const float factor = weight_of(total.top, top);
    total = {top, total.sum * factor};
    rescale(factor, sums);
    MM_UNROLL
    for (uint u = 0; u < 2; ++u) {
      if (u >= count) continue;
      own[u] = weight_of(own[u], total.top);
      total.sum += own[u];  // the lane's slots alone
    }
  }

  // sums = factor sums; the factor of a row from the lane that finishes its scores.
  static METAL_FUNC void rescale(float factor, thread Pieces& sums) {
    MM_UNROLL
    for (uint j = 0; j < kRows; ++j) {
      if (j >= lane_rows()) continue;
      const float f = simd_shuffle_xor(factor, ushort(j));
      MM_UNROLL
      for (int i = 0; i < 8; ++i) sums.v[j][i] *= f;
    }
  }

  // Values behind the last slot become zeros: their weight is 0, which Inf would make NaN.
  static METAL_FUNC void drop_behind(Walk w, int left, thread typename Values::Raw (&raw)[kSlots]) {
    MM_UNROLL
    for (uint u = 0; u < kSlots; ++u) {
      if (is_behind(w, left, u)) Values::drop(raw[u]);
    }
  }

  static METAL_FUNC void add_values(Walk w, thread const typename Values::Raw (&raw)[kSlots],
                                    thread const float (&own)[2], thread Pieces& sums) {
    MM_UNROLL
    for (uint u = 0; u < kSlots; ++u) {
      float value[8];
      Values::unpack(raw[u], w.piece, value);
      const float scale = Values::scale(raw[u]);
      MM_UNROLL
      for (uint j = 0; j < kRows; ++j) {
        if (j >= lane_rows()) continue;
        const float weight = of_slot(own, u, j) * scale;
        MM_UNROLL
        for (int i = 0; i < 8; ++i) sums.v[j][i] = fma(weight, value[i], sums.v[j][i]);
      }
    }
  }

  // All slots of a simdgroup. kPaged: where a step's slots lie is read once for keys and values.
  template <bool kPaged>
  static METAL_FUNC void add(Walk w, constant KernelArgs& args, Scores row, Span span, uint sg,
                             thread const Pieces& q, thread Total& total, thread Pieces& sums) {
    const uint step = kSlots * w.groups, stride = G::kSimdgroups * step;
    uint t = span.first + sg * step;
    if (t >= span.last) return;
    typename Keys::Raw keys[kSlots];
    typename Values::Raw values[kSlots];
    Row keys_at = w.keys + t * w.key_stride, values_at = w.values + t * w.value_stride;
    int left = int(span.last - 1 - t);
    Places paged = {};
    if (kPaged && kAhead) paged = places(w, left);
    if (kAhead) fetch<Keys, kPaged>(w, w.keys, keys_at, w.key_stride, left, paged, keys);
    for (; left >= 0; left -= int(stride)) {
      float s[kSlots], own[2];
      if (kAhead) {
        fetch<Values, kPaged>(w, w.values, values_at, w.value_stride, left, paged, values);
      } else {
        if (kPaged) paged = places(w, left);
        fetch<Keys, kPaged>(w, w.keys, keys_at, w.key_stride, left, paged, keys);
      }
      MM_UNROLL
      for (uint u = 0; u < kSlots; ++u) s[u] = multiply(w, keys[u], q);
      keys_at += stride * w.key_stride;
      if (kAhead) {
        if (kPaged) paged = places(w, left - int(stride));
        fetch<Keys, kPaged>(w, w.keys, keys_at, w.key_stride, left - int(stride), paged, keys);
      }
      add_up(s, own);
      weigh(w, args, row, left, own, total, sums);
      if (!kAhead) {
        fetch<Values, kPaged>(w, w.values, values_at, w.value_stride, left, paged, values);
      }
      values_at += stride * w.value_stride;
      drop_behind(w, left, values);
      add_values(w, values, own, sums);
    }
  }

  // The groups of a simdgroup as one.
  static METAL_FUNC void join_groups(Walk w, thread Total& total, thread Pieces& sums) {
    total.sum += simd_shuffle_xor(total.sum, ushort(4));
    if (!has_two()) total.sum += simd_shuffle_xor(total.sum, ushort(8));
    float top = total.top;
    for (uint o = w.lanes; o < kSimdWidth; o *= 2) top = max(top, simd_shuffle_xor(top, ushort(o)));
    const float factor = weight_of(total.top, top);
    total = {top, total.sum * factor};
    rescale(factor, sums);
    for (uint o = w.lanes; o < kSimdWidth; o *= 2) {
      total.sum += simd_shuffle_xor(total.sum, ushort(o));
      MM_UNROLL
      for (uint j = 0; j < kRows; ++j) {
        if (j >= lane_rows()) continue;
        MM_UNROLL
        for (int i = 0; i < 8; ++i) sums.v[j][i] += simd_shuffle_xor(sums.v[j][i], ushort(o));
      }
    }
  }

  // Row r of simdgroup s in threadgroup memory: fc_k sums, largest score, sum of weights.
  static METAL_FUNC threadgroup float* joint(threadgroup float* memory, uint s, uint r) {
    return memory + (s * fc_batch + r) * (fc_k + 2);
  }

  static METAL_FUNC void share(Walk w, Total total, thread const Pieces& sums,
                               threadgroup float* memory, uint sg) {
    MM_UNROLL
    for (uint j = 0; j < kRows; ++j) {
      const uint r = row_of(w.lane, j);
      if (j >= lane_rows() || r >= fc_batch || w.group != 0 || !w.owns) continue;
      threadgroup float* to = joint(memory, sg, r);
      MM_UNROLL
      for (int i = 0; i < 8; ++i) to[Values::Layout::value(w.piece, i)] = sums.v[j][i];
    }
    if (w.group == 0 && w.lane < fc_batch) {
      threadgroup float* to = joint(memory, sg, w.lane) + fc_k;
      to[0] = total.top;
      to[1] = total.sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // A simdgroup stores a row.
  static METAL_FUNC void store(AttentionResult<T> result, constant KernelArgs& args,
                               threadgroup float* memory, uint r0, uint part, Position at) {
    static_assert(G::kSimdgroups >= kRows, "a simdgroup for every row");
    const uint r = at.sg;
    if (r >= min(fc_batch, rows_of_head(args) - r0)) return;
    float factors[G::kSimdgroups];
    Total all = {-INFINITY, 0.0f};
    MM_UNROLL
    for (uint s = 0; s < G::kSimdgroups; ++s) all.top = max(all.top, joint(memory, s, r)[fc_k]);
    MM_UNROLL
    for (uint s = 0; s < G::kSimdgroups; ++s) {
      threadgroup const float* from = joint(memory, s, r) + fc_k;
      factors[s] = weight_of(from[0], all.top);
      all.sum = fma(from[1], factors[s], all.sum);
    }
    const QueryRow row = query_row(args, at, r0 + r);
    for (uint d = at.lane; d < fc_k; d += kSimdWidth) {
      float sum = 0.0f;
      MM_UNROLL
      for (uint s = 0; s < G::kSimdgroups; ++s) {
        sum = fma(joint(memory, s, r)[d], factors[s], sum);
      }
      AttentionResult<T>::store(result, args, row, part, d, sum, all);
    }
  }

  static METAL_FUNC void run(AttentionOperands<T> in, device T* y, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    threadgroup float* floats = reinterpret_cast<threadgroup float*>(memory);
    const uint rows = rows_of_head(args), row_groups = (rows + fc_batch - 1) / fc_batch;
    const uint part = at.tg.x / row_groups, r0 = at.tg.x % row_groups * fc_batch;
    const uint filled = filled_slots(in.length, args, at);
    const Span span = slots_of_part(args, filled, part);
    const Walk w = walk(in, args, span.last, at);
    Pieces q, sums = {};
    load_queries(in, args, w, r0, at, q);
    Total total = {-INFINITY, 0.0f};
    const Scores scores = Scores::of_row(in, args, filled, row_at(args, at, r0 + row_of(w.lane)));
    if (fc_epilogue & kAttentionPages) {
      add<true>(w, args, scores, span, at.sg, q, total, sums);
    } else {
      add<false>(w, args, scores, span, at.sg, q, total, sums);
    }
    join_groups(w, total, sums);
    share(w, total, sums, floats, at.sg);
    store({y, in.sinks}, args, floats, r0, part, at);
  }
};

// Keys are of the values' format, or f16: a function constant says which, so that a pair of formats
// is no kernel more.
template <class Format, class T>
struct AttentionSplit {
  static METAL_FUNC void run(AttentionOperands<T> in, device T* y, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    if (fc_epilogue & kAttentionHalfKeys) {
      AttentionSplitOf<F16, Format, T>::run(in, y, args, memory, at);
    } else {
      AttentionSplitOf<Format, Format, T>::run(in, y, args, memory, at);
    }
  }
};

}  // namespace metalmm
