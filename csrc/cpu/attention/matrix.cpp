// Many queries: scores = q kᵀ and softmax(scores) v as products of matrices, a block of queries at
// a time, by the kernels of linear layers. Keys are weights as they lie; values are decoded and
// transposed once for a head.
#include "cpu/parallel.h"
#include "scores.h"

namespace metalmm::cpu {
namespace {

constexpr int64_t kMostScores = 1 << 22;  // 16 MB of them at a time
// A query's result does not depend on the queries beside it: every block takes the same kernel, and
// begins at a multiple of the lanes of the sum of weights.
constexpr Strategy kStrategy = Strategy::kGemm;
constexpr int64_t kFirst = 16;

// Queries of a block: what the products need to pay, and no more than the memory of their scores.
int64_t block_queries(const Attention& a) {
  const int64_t fits = kMostScores / std::max<int64_t>(1, a.group() * a.longest());
  return std::clamp<int64_t>(fits, 16, 256);
}

// Scores [group * n, slots] of the queries [i0, i0 + n) to weights, divided by their sum.
void soften(const Attention& a, int64_t b, int64_t kv_head, int64_t i0, int64_t n, Span span,
            at::Tensor& scores) {
  const AttentionKernels& kernels = current_isa().attention;
  const int64_t slots = span.last - span.first;
  float* s = scores.mutable_data_ptr<float>();
  parallel_for(0, scores.size(0), std::max<int64_t>(1, (1 << 13) / slots),
               [&](int64_t first, int64_t last) {
                 for (int64_t r = first; r < last; ++r) {
                   const int64_t head = kv_head * a.group() + r / n;
                   float* row = s + r * slots;
                   a.finish_scores(b, head, i0 + r % n, span, row);
                   float top = kernels.top(row, slots);
                   if (!a.sinks.empty()) top = std::max(top, a.sinks[head]);
                   float total = kernels.exp(row, slots, top);
                   if (top != kNothing) total += sink_weight(a, head, top);
                   if (total == 0) continue;
                   for (int64_t t = 0; t < slots; ++t) row[t] /= total;
                 }
               });
}

// The slots of the queries [i0, i1).
Span block_span(const Attention& a, int64_t b, int64_t i0, int64_t i1) {
  const Span seen = a.seen_by(b, i0, i1);
  return {seen.first < seen.last ? seen.first / kFirst * kFirst : seen.first, seen.last};
}

// Rows [slots, row_bytes] of a head: where they lie, or copies of those in several runs.
at::Tensor rows_of(const Attention& a, const CacheRows& cache, int64_t b, int64_t kv_head,
                   Span slots) {
  std::vector<at::Tensor> runs;
  a.each_run(b, slots, [&](Span run, int64_t place) {
    runs.push_back(cache.head(b, kv_head, place, run.last - run.first));
  });
  if (runs.empty()) return cache.head(b, kv_head, 0, 0);
  return runs.size() == 1 ? runs[0] : at::cat(runs);
}

}  // namespace

void attend_matrix(const Attention& a, float* out) {
  const Format& f32 = format_by_name("f32");
  const int64_t group = a.group(), most = block_queries(a);
  at::Tensor y = at::from_blob(out, {a.batch, a.queries, a.kv_heads, group, a.dim}, a.q.options());
  for (int64_t i = 0; i < a.batch * a.kv_heads; ++i) {
    const int64_t b = i / a.kv_heads, kv_head = i % a.kv_heads;
    const Span all = block_span(a, b, 0, a.queries);
    const int64_t context = all.last - all.first;
    at::Tensor values = at::empty({a.dim, context}, a.q.options());
    const at::Tensor rows_of_values = rows_of(a, a.values, b, kv_head, all);
    values.copy_(decode_rows(rows_of_values, a.values.format(), a.dim, 0, context).t());
    for (int64_t i0 = 0; i0 < a.queries; i0 += most) {
      const int64_t n = std::min(most, a.queries - i0);
      const Span span = block_span(a, b, i0, i0 + n);
      const int64_t slots = span.last - span.first;
      at::Tensor to = y.select(0, b).select(1, kv_head).narrow(0, i0, n);  // [n, group, D]
      if (slots == 0) {
        to.zero_();
        continue;
      }
      const at::Tensor rows = a.q.select(0, b)
                                  .narrow(0, kv_head * group, group)
                                  .narrow(1, i0, n)
                                  .reshape({group * n, a.dim});
      at::Tensor scores = matmul(rows, rows_of(a, a.keys, b, kv_head, span), a.keys.format(),
                                 at::kFloat, kStrategy);
      soften(a, b, kv_head, i0, n, span, scores);
      const at::Tensor seen = values.narrow(1, span.first - all.first, slots).view(at::kByte);
      to.copy_(
          matmul(scores, seen, f32, at::kFloat, kStrategy).view({group, n, a.dim}).transpose(0, 1));
    }
  }
}

}  // namespace metalmm::cpu
