#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "ops/attention/composed.h"
#include "ops/attention/sdpa.h"
#include "plan/passes.h"
#include "scores.h"

namespace metalmm::cpu {
namespace {

// Queries from which the products as matrices pay for decoding keys and values apart.
constexpr int64_t kSplitQueries = 16;

// Rows [B, kv_heads, T, row] as values [B, kv_heads, T, D]; packed ones in f32.
at::Tensor decoded(const at::Tensor& rows, const Format& format, int64_t dim) {
  if (rows.scalar_type() != at::kByte) return rows;
  const at::Tensor flat = rows.reshape({-1, rows.size(3)});
  const at::Tensor values = decode_rows(flat, format, dim, 0, flat.size(0));
  return values.view({rows.size(0), rows.size(1), rows.size(2), dim});
}

// Ours: of 512 queries torch's flash attention takes 1.6 times as long in f32, 2.2 in bf16
// (bench/results.md). Torch's takes 0.6 to 0.7 of the time for 17 to 64 queries of as few slots and
// as many heads of keys as of q, which is less than a millisecond.
AttentionWay choose_way(int64_t queries) {
  return queries <= kSplitQueries ? AttentionWay::kSplit : AttentionWay::kTile;
}

// q * scale in f32, dense. torch's product by a number takes a token's few values 2 us.
at::Tensor scaled(const at::Tensor& q, float scale) {
  const at::Tensor from = q.to(at::kFloat).contiguous();
  at::Tensor out = at::empty(from.sizes(), from.options());
  const float* x = elements<float>(from);
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, from.numel(), 1 << 15, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) to[i] = x[i] * scale;
  });
  return out;
}

template <class Values>
void add_mask(const Values* mask, Span span, float* s) {
  for (int64_t t = span.first; t < span.last; ++t) s[t - span.first] += mask[t];
}

}  // namespace

void Attention::finish_scores(int64_t b, int64_t head, int64_t i, Span at, float* s) const {
  const int64_t n = at.last - at.first;
  if (softcap > 0) {
    for (int64_t t = 0; t < n; ++t) s[t] = std::tanh(s[t] / softcap) * softcap;
  }
  if (mask.defined()) {
    const int64_t row = b * mask.stride(0) + head * mask.stride(1) + i * mask.stride(2);
    if (mask.scalar_type() == at::kBool) {
      const bool* open = elements<bool>(mask) + row + at.first;
      for (int64_t t = 0; t < n; ++t) s[t] = open[t] ? s[t] : kNothing;
    } else {
      add_mask(elements<float>(mask) + row, at, s);
    }
  }
  const Span seen = seen_by(b, i);
  std::fill(s, s + std::clamp<int64_t>(seen.first - at.first, 0, n), kNothing);
  std::fill(s + std::clamp<int64_t>(seen.last - at.first, 0, n), s + n, kNothing);
}

at::Tensor attention(const args::attention& given) {
  const Tensor &q = given.q, &keys = given.keys, &values = given.values;
  const AttentionShape shape = check(given);
  if (shape.cache.is_rotated()) {
    return attend_rotated(
        given, shape.cache, [](const at::Tensor& t) { return hadamard(args::hadamard{t}); },
        attention);
  }
  std::vector<int64_t> lengths = check_lengths(given);
  check_page_numbers(given);
  const int64_t slots = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), dim = q.size(3);
  const Problem problem = attention_problem(given, shape, slots, true);
  const AttentionWay way = find_way(given).value_or(choose_way(queries));
  TORCH_CHECK_VALUE(
      !given.pages.has_value() || way == AttentionWay::kSplit || way == AttentionWay::kTile,
      "strategy: ", kAttentionWays[static_cast<int>(way)],
      " reads no pages; allowed: attention_split, attention_tile");
  if (way == AttentionWay::kTorch) {
    return composed::attention(given, decoded(keys, shape.cache.keys, dim),
                               decoded(values, shape.cache.values, dim));
  }
  if (way == AttentionWay::kSdpa) {
    const auto decode = [&](const at::Tensor& rows, const Format& format) {
      return decoded(rows, format, dim);
    };
    const at::Tensor y = composed::sdpa(problem, given, {keys, shape.cache.keys},
                                        {values, shape.cache.values}, std::nullopt, decode);
    if (y.defined()) return y;
  }
  at::Tensor out = at::empty({batch, queries, heads, dim}, q.options().dtype(at::kFloat));
  if (out.numel() == 0 || slots == 0) return out.zero_().to(q.scalar_type());
  Attention a{batch,
              heads,
              keys.size(1),
              queries,
              dim,
              std::move(lengths),
              {},
              {keys, shape.cache.keys, dim},
              {values, shape.cache.values, dim},
              scaled(q, static_cast<float>(scale_of(given))),
              {},
              {},
              static_cast<float>(given.softcap),
              window_of(given),
              given.causal};
  if (given.mask.has_value()) {
    const at::Tensor dense =
        given.mask->scalar_type() == at::kBool ? *given.mask : given.mask->to(at::kFloat);
    a.mask = (dense.stride(3) == 1 ? dense : dense.contiguous())
                 .expand({batch, heads, queries, dense.size(3)});
  }
  if (given.pages.has_value()) {
    const at::Tensor dense = given.pages->contiguous();
    a.pages.assign(elements<int64_t>(dense), elements<int64_t>(dense) + dense.numel());
  }
  if (given.sinks.has_value()) {
    const at::Tensor s = given.sinks->to(at::kFloat).contiguous();
    a.sinks.assign(elements<float>(s), elements<float>(s) + heads);
  }
  (way == AttentionWay::kSplit ? attend_split : attend_matrix)(a, out.mutable_data_ptr<float>());
  return out.to(q.scalar_type());
}

}  // namespace metalmm::cpu
