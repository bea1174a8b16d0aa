// Flash decoding: a task takes one head of keys and one part of the context, and walks keys, then
// values, once for all queries of the head's group. The parts are joined in their order. How long a
// part is depends on the length of the context alone, so results do not on the number of threads.
#include <cstdint>

#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "scores.h"

namespace metalmm::cpu {
namespace {

constexpr int64_t kPartSlots = 256;  // 34 KB of q8_0 keys of 128 values
constexpr int64_t kMostParts = 64;   // the results of a part are as large as the queries
constexpr int64_t kBlockSlots = 64;  // rows that are decoded at a time: 32 KB of 128 values

int64_t part_slots(int64_t length) {
  return round_up(std::max(kPartSlots, ceil_div(length, kMostParts)), kPartSlots);
}

// Queries as the dot kernels take them: groups of up to kMaxDotRows rows.
struct Queries {
  int64_t rows, dim;
  Lines<float> values;  // [heads of keys of the batch][groups of rows], interleaved
  int64_t head_stride;

  Queries(const Attention& a) : rows(a.group() * a.queries), dim(round_up(a.dim, kChunkValues)) {
    head_stride = round_up(rows, kMaxDotRows) * dim;
    values.resize(a.batch * a.kv_heads * head_stride);
    const float* from = elements<float>(a.q);
    for (int64_t i = 0; i < a.batch * a.kv_heads; ++i) {
      for (int64_t r = 0; r < rows; r += kMaxDotRows) {
        const int64_t m = std::min<int64_t>(kMaxDotRows, rows - r);
        interleave(from + (i * rows + r) * a.dim, a.dim, m, a.dim, kDotRows[kernel(m)],
                   current_isa().width, values.data() + i * head_stride + r * dim);
      }
    }
  }
  // The index of the dot kernel for m rows.
  static int kernel(int64_t m) {
    int i = 0;
    while (kDotRows[i] < m) ++i;
    return i;
  }
  const float* group(int64_t head, int64_t r) const {
    return values.data() + head * head_stride + r * dim;
  }
};

// The weight of a head's sink beside scores of which `top` is the largest; 0 without sinks.
float sink_weight(const Attention& a, int64_t head, float top) {
  return a.sinks.empty() ? 0.f : std::exp(a.sinks[head] - top);
}

struct Split {
  const Attention& a;
  const Queries& x;
  int64_t part, parts;  // the largest of a sequence: its slots, and how many there are
  // The largest score, sum of weights and sum of weighed values of each row of each part.
  std::vector<float> tops, sums;
  Lines<float> weighed;
  const Format& f32 = format_by_name("f32");

  Split(const Attention& attention, const Queries& queries)
      : a(attention), x(queries), part(0), parts(0) {
    for (const int64_t length : a.lengths) {
      part = std::max(part, part_slots(length));
      parts = std::max(parts, ceil_div(length, part_slots(length)));
    }
    const int64_t count = a.batch * a.kv_heads * parts * x.rows;
    tops.assign(count, kNothing);
    sums.assign(count, 0);
    weighed.assign(count * x.dim, 0);
  }

  // s[r * part + t] = q k of the slots of the span, for every row r.
  void dots(int64_t head, Span span, float* s, float* decoded) const {
    const int64_t b = head / a.kv_heads;
    const Weight keys = a.keys.weight(b, head % a.kv_heads);
    const auto multiply = [&](const CodecKernels& codec, const Weight& w, Span rows, float* to) {
      for (int64_t r = 0; r < x.rows; r += kMaxDotRows) {
        const int64_t m = std::min<int64_t>(kMaxDotRows, x.rows - r);
        codec.dot[Queries::kernel(m)](
            {w, rows.first, rows.last, x.group(head, r), to + r * part, part});
      }
    };
    if (x.rows <= kMaxDotRows) {
      a.each_run(b, span, [&](Span run, int64_t place) {
        if (run.last < span.last) a.prefetch_keys(b, head % a.kv_heads, run.last);
        multiply(a.keys.kernels(), keys, {place, place + run.last - run.first},
                 s + run.first - span.first);
      });
      return;
    }
    const Weight block{reinterpret_cast<const uint8_t*>(decoded), x.dim * 4, x.dim, {}};
    for (int64_t t = span.first; t < span.last; t += kBlockSlots) {
      const int64_t n = std::min(kBlockSlots, span.last - t);
      a.decode(a.keys, b, head % a.kv_heads, t, n, x.dim, decoded);
      multiply(kernels_of(f32), block, {0, n}, s + t - span.first);
    }
  }

  // The part `index` of a head of keys, counted over the batch.
  void task(int64_t head, int64_t index, float* s, float* decoded) {
    const int64_t b = head / a.kv_heads, own = part_slots(a.lengths[b]);
    const Span seen = a.seen_by(b, 0, a.queries);
    const Span span{std::max(index * own, seen.first), std::min((index + 1) * own, seen.last)};
    if (span.first >= span.last) return;
    dots(head, span, s, decoded);
    const IsaKernels& isa = current_isa();
    const int64_t n = span.last - span.first, row0 = (head * parts + index) * x.rows;
    for (int64_t r = 0; r < x.rows; ++r) {
      const int64_t query_head = head % a.kv_heads * a.group() + r / a.queries;
      a.finish_scores(b, query_head, r % a.queries, span, s + r * part);
      tops[row0 + r] = isa.attention.top(s + r * part, n);
      sums[row0 + r] = isa.attention.exp(s + r * part, n, tops[row0 + r]);
    }
    for (int64_t t = 0; t < n; t += kBlockSlots) {
      const int64_t count = std::min(kBlockSlots, n - t);
      a.decode(a.values, b, head % a.kv_heads, span.first + t, count, x.dim, decoded);
      for (int64_t r = 0; r < x.rows;) {
        int kernel = kNumWeighKernels - 1;
        while ((int64_t{1} << kernel) > x.rows - r) --kernel;
        isa.attention.weigh[kernel]({s + r * part + t, part, decoded, x.dim, count, x.dim,
                                     weighed.data() + (row0 + r) * x.dim, x.dim});
        r += int64_t{1} << kernel;
      }
    }
  }

  // The parts of row r of a head of keys as one.
  void join(int64_t head, int64_t r, float* out) const {
    const int64_t query_head = head % a.kv_heads * a.group() + r / a.queries;
    const auto at = [&](int64_t p) { return (head * parts + p) * x.rows + r; };
    float top = a.sinks.empty() ? kNothing : a.sinks[query_head];
    for (int64_t p = 0; p < parts; ++p) top = std::max(top, tops[at(p)]);
    float total = a.sinks.empty() || top == kNothing ? 0 : sink_weight(a, query_head, top);
    std::fill(out, out + a.dim, 0.f);
    for (int64_t p = 0; p < parts; ++p) {
      if (tops[at(p)] == kNothing && sums[at(p)] == 0) continue;
      const float factor = tops[at(p)] == top ? 1 : std::exp(tops[at(p)] - top);
      total += factor * sums[at(p)];
      const float* from = weighed.data() + at(p) * x.dim;
      for (int64_t d = 0; d < a.dim; ++d) out[d] += factor * from[d];
    }
    if (total == 0) return;
    for (int64_t d = 0; d < a.dim; ++d) out[d] /= total;
  }
};

}  // namespace

void attend_split(const Attention& a, float* out) {
  const Queries x(a);
  Split split(a, x);
  const int64_t kv = a.batch * a.kv_heads;
  const int64_t work = std::min(split.part, a.longest()) * x.rows * x.dim;
  parallel_for(0, kv * split.parts, std::max<int64_t>(1, (1 << 14) / work),
               [&](int64_t first, int64_t last) {
                 Lines<float> s((x.rows + kMaxDotRows) * split.part);
                 Lines<float> decoded(kBlockSlots * x.dim);
                 for (int64_t i = first; i < last; ++i) {
                   split.task(i / split.parts, i % split.parts, s.data(), decoded.data());
                 }
               });
  parallel_for(0, kv * x.rows, std::max<int64_t>(1, (1 << 15) / (split.parts * x.dim)),
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) {
                   const int64_t head = i / x.rows, r = i % x.rows;
                   const int64_t b = head / a.kv_heads, query = r % a.queries;
                   const int64_t query_head = head % a.kv_heads * a.group() + r / a.queries;
                   split.join(head, r,
                              out + ((b * a.queries + query) * a.heads + query_head) * a.dim);
                 }
               });
}

}  // namespace metalmm::cpu
