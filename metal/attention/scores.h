// The parts that the kernels of attention share: which slots a query sees, its scores, and how the
// parts of a row of q are joined.
#pragma once

#include <metal_simdgroup>

#include "../layer/soft_cap.h"
#include "../tile/load.h"

namespace metalmm {

template <class T>
struct AttentionOperands {
  device const T* q;  // [sequence, head, query, fc_k]
  device const uchar* keys;
  device const uchar* values;
  device const uchar* mask;  // bool or float [sequence, head, query, slot]
  device const T* sinks;     // or float [head]
  device const long* length;
  device const long* pages;  // [sequence, page of args.n slots]
};

// Slots [first, last).
struct Span {
  uint first, last;
};

// A row of q: of head `head` of a sequence, query `query`.
struct QueryRow {
  uint sequence, head, query;
};

// With kAttentionAlone a threadgroup has rows of one query, and tg.z counts the queries of all
// sequences.
METAL_FUNC bool is_alone() { return (fc_epilogue & kAttentionAlone) != 0; }
METAL_FUNC uint queries_of(constant KernelArgs& args) { return is_alone() ? 1 : args.positions; }
METAL_FUNC uint sequence_of(constant KernelArgs& args, Position at) {
  return is_alone() ? at.tg.z / args.positions : at.tg.z;
}
METAL_FUNC uint first_query(constant KernelArgs& args, Position at) {
  return is_alone() ? at.tg.z % args.positions : 0;
}

// Row r of the threadgroup's rows of a head of keys: all queries of its first head of q, of its
// second, ...
METAL_FUNC QueryRow query_row(constant KernelArgs& args, Position at, uint r) {
  const uint group = args.heads / args.kv_heads, queries = queries_of(args);
  return {sequence_of(args, at), at.tg.y * group + r / queries,
          first_query(args, at) + r % queries};
}
METAL_FUNC uint rows_of_head(constant KernelArgs& args) {
  return args.heads / args.kv_heads * queries_of(args);
}
// The place of the row in q, in the partial results, and in y [sequence, query, head].
METAL_FUNC ulong row_of_q(constant KernelArgs& args, QueryRow row) {
  return (ulong(row.sequence) * args.heads + row.head) * args.positions + row.query;
}
// The place of row r of a head of keys: rows of all queries follow each other.
METAL_FUNC ulong row_of_q(constant KernelArgs& args, Position at, uint r) {
  if (is_alone()) return row_of_q(args, query_row(args, at, r));
  return (ulong(at.tg.z) * args.kv_heads + at.tg.y) * rows_of_head(args) + r;
}
METAL_FUNC ulong row_of_y(constant KernelArgs& args, QueryRow row) {
  return (ulong(row.sequence) * args.positions + row.query) * args.heads + row.head;
}

// The filled slots: all, where args.count says that they hold rows; else a length that the host has
// not seen, made one that the cache has. With kAttentionAlone those up to the query's own.
METAL_FUNC uint filled_slots(device const long* length, constant KernelArgs& args, Position at) {
  const uint own = fc_epilogue & kAttentionPages ? sequence_of(args, at) : 0;
  const uint filled = args.count != 0 ? args.n : uint(clamp(length[own], 0L, long(args.n)));
  if (!is_alone()) return filled;
  return filled - min(filled, args.positions - 1 - first_query(args, at));
}

// The places of a sequence's slots among those of the cache.
struct Slots {
  device const long* pages;  // pages of the sequence, made ones that the cache has
  uint count;                // pages of the cache

  template <class T>
  static METAL_FUNC Slots of(AttentionOperands<T> in, constant KernelArgs& args, uint sequence) {
    return {in.pages + ulong(sequence) * (args.n / kPageSlots), args.k_per_part};
  }
  // In pages. A clamp of all 64 bits of the number takes a tenth of the time of a query more.
  static METAL_FUNC uint place(Slots s, uint t) {
    const uint page = min(uint(s.pages[t / kPageSlots]), s.count - 1);
    return page * kPageSlots + t % kPageSlots;
  }
};

// The slots that a query sees where `filled` slots have rows, the last ones the queries' own.
METAL_FUNC Span seen_by(constant KernelArgs& args, uint filled, uint query) {
  const int own = int(filled) - (is_alone() ? 1 : int(args.positions) - int(query));
  Span out = {0, filled};
  if (fc_epilogue & kAttentionCausal) out.last = uint(clamp(own + 1, 0, int(filled)));
  if (fc_epilogue & kAttentionWindow) {
    out.first = uint(clamp(own - int(args.window) + 1, 0, int(out.last)));
  }
  return out;
}

// The slots of a part, of those that all queries see.
METAL_FUNC Span slots_of_part(constant KernelArgs& args, uint filled, uint part) {
  const uint first = seen_by(args, filled, 0).first;
  const uint last = seen_by(args, filled, queries_of(args) - 1).last;
  if (first >= last) return {0, 0};
  if ((fc_epilogue & kEpiloguePartial) == 0) return {first, last};
  const uint slots = part_slots(last - first);
  return {min(first + part * slots, last), min(first + (part + 1) * slots, last)};
}

// Scores from the products of a row of q with keys.
struct Scores {
  device const uchar* mask;  // mask of the row
  Span seen;

  template <class T>
  static METAL_FUNC Scores of_row(AttentionOperands<T> in, constant KernelArgs& args, uint filled,
                                  QueryRow row) {
    const long at = long(row.sequence) * args.x2_sequence_stride +
                    long(row.head) * args.x2_head_stride + long(row.query) * args.x2_stride;
    const uint value_bytes = fc_epilogue & kAttentionFloatMask ? 4 : 1;
    return {in.mask + at * value_bytes, seen_by(args, filled, row.query)};
  }

  // The score of slot t of the part, -inf where the row does not see the slot.
  static METAL_FUNC float finish(Scores row, constant KernelArgs& args, uint t, float product) {
    float s = product * args.alpha;
    if (fc_epilogue & kAttentionSoftcap) s = soft_cap(s, args.softcap);
    if (fc_epilogue & kAttentionFloatMask) s += reinterpret_cast<device const float*>(row.mask)[t];
    bool open = true;
    if (fc_epilogue & kAttentionBoolMask) open = row.mask[t] != 0;
    if (fc_epilogue & (kAttentionCausal | kAttentionWindow)) {
      open = open && t >= row.seen.first && t < row.seen.last;
    }
    return open ? s : -INFINITY;
  }
};

// exp(s - top), where no score at all leaves 0 instead of NaN.
METAL_FUNC float weight_of(float s, float top) { return exp(s - (top == -INFINITY ? 0.0f : top)); }

// The largest score of a row over some slots, and the sum of weights exp(score - top).
struct Total {
  float top, sum;
};
METAL_FUNC Total joined(Total a, Total b) {
  const float top = max(a.top, b.top);
  return {top, a.sum * weight_of(a.top, top) + b.sum * weight_of(b.top, top)};
}

// The sink of a head as slots without values: a score more.
template <class T>
METAL_FUNC Total with_sink(Total all, device const T* sinks, uint head) {
  if ((fc_epilogue & kAttentionSinks) == 0) return all;
  const float sink = fc_epilogue & kAttentionFloatSinks
                         ? reinterpret_cast<device const float*>(sinks)[head]
                         : float(sinks[head]);
  return joined(all, {sink, 1.0f});
}

// A value of the result: `sum` of weighed values whose weights have the largest score `top`.
METAL_FUNC float quotient(float sum, float top, Total all) {
  return all.sum == 0.0f ? 0.0f : sum * weight_of(top, all.top) / all.sum;
}

// The results of a part for a row: fc_k sums; behind those of all rows and parts, their totals.
struct Partials {
  device float* sums;
  device float2* totals;
  ulong parts;

  static METAL_FUNC Partials at(device float* workspace, constant KernelArgs& args) {
    const ulong count = ulong(args.m) * args.parts;
    return {workspace, reinterpret_cast<device float2*>(workspace + count * fc_k), args.parts};
  }
  static METAL_FUNC device float* sums_of(Partials p, ulong row, uint part) {
    return p.sums + (row * p.parts + part) * fc_k;
  }
  static METAL_FUNC device float2* total_of(Partials p, ulong row, uint part) {
    return p.totals + (row * p.parts + part);
  }
};

// The place of the fc_k results of row `row`, or of the sums of a part.
template <class T>
struct AttentionResult {
  device T* y;
  device const T* sinks;

  static METAL_FUNC void store(AttentionResult r, constant KernelArgs& args, QueryRow row,
                               uint part, uint d, float sum, Total total) {
    if (fc_epilogue & kEpiloguePartial) {
      const Partials p = Partials::at(reinterpret_cast<device float*>(r.y), args);
      const ulong at = row_of_q(args, row);
      Partials::sums_of(p, at, part)[d] = sum;
      if (d == 0) *Partials::total_of(p, at, part) = float2(total.top, total.sum);
      return;
    }
    const Total all = with_sink(total, r.sinks, row.head);
    r.y[row_of_y(args, row) * fc_k + d] = T(quotient(sum, total.top, all));
  }
};

}  // namespace metalmm
