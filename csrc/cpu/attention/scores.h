// The parts that both walks of attention share: the problem, its rows, and the scores of a query.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/matmul.h"
#include "ops/attention/checks.h"
#include "ops/tensors.h"

namespace metalmm::cpu {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Packed rows [B, kv_heads, capacity, row] of a cache, where they lie.
class CacheRows {
 public:
  CacheRows(const at::Tensor& rows, const Format& format, int64_t dim)
      : dense_(rows.stride(3) == 1 ? rows : rows.clone(at::MemoryFormat::Contiguous)),
        format_(format) {
    const int64_t bytes = dense_.element_size();
    last_ = dense_.size(0) - 1;
    batch_stride_ = dense_.stride(0) * bytes;
    head_stride_ = dense_.stride(1) * bytes;
    const auto* data = static_cast<const uint8_t*>(dense_.const_data_ptr());
    first_ = make_weight(data, dense_.stride(2) * bytes, format, dim);
    row_bytes_ = format.row_bytes(dim);
  }

  const CodecKernels& kernels() const { return kernels_of(format_); }
  // At least 1; the distance of rows is another, and perhaps 0.
  int64_t row_bytes() const { return row_bytes_; }
  // The rows of one head; of any batch where one cache is that of all sequences.
  Weight weight(int64_t batch, int64_t kv_head) const {
    Weight out = first_;
    out.data += std::min(batch, last_) * batch_stride_ + kv_head * head_stride_;
    return out;
  }

 private:
  at::Tensor dense_;
  const Format& format_;
  int64_t last_, batch_stride_, head_stride_, row_bytes_;
  Weight first_;  // the first head of the first sequence
};

// Slots [first, last).
struct Span {
  int64_t first, last;
};

// Prefetches the lines of `bytes` from p on. Inlined, since GCC leaves out calls of a function that
// does nothing else.
[[gnu::always_inline]] inline void prefetch(const uint8_t* p, int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(p + i);
}

struct Attention {
  int64_t batch, heads, kv_heads, queries, dim;
  std::vector<int64_t> lengths;  // slots of each sequence
  std::vector<int64_t> pages;    // [B, slots / kPageSlots] of a cache in pages
  CacheRows keys, values;
  at::Tensor q;     // f32 [B, heads, S, D], dense, times the scale
  at::Tensor mask;  // f32 or bool [B, heads, S, T], perhaps expanded, its last dimension dense
  std::vector<float> sinks;
  float softcap;
  int64_t window;
  bool causal;

  int64_t group() const { return heads / kv_heads; }

  // The slots that query i of a sequence may see.
  Span seen_by(int64_t b, int64_t i) const {
    const int64_t length = lengths[b], own = length - queries + i;
    const int64_t last = causal ? std::clamp<int64_t>(own + 1, 0, length) : length;
    const int64_t first = window > 0 ? std::clamp<int64_t>(own - window + 1, 0, length) : 0;
    return {std::min(first, last), last};
  }
  // The slots that one of the queries [i0, i1) may see.
  Span seen_by(int64_t b, int64_t i0, int64_t i1) const {
    const Span first = seen_by(b, i0);
    return {first.first, std::max(first.first, seen_by(b, i1 - 1).last)};
  }

  // The pages of a sequence; null where the cache has none.
  const int64_t* pages_of(int64_t b) const {
    return pages.empty() ? nullptr : pages.data() + b * (pages.size() / batch);
  }

  int64_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

  // f(the slots [first, last), where they begin in the cache) for each run of slots that follow
  // each other there. Without pages that is one.
  template <class F>
  void each_run(int64_t b, Span at, const F& f) const {
    const int64_t* own = pages_of(b);
    for (int64_t t = at.first; t < at.last;) {
      int64_t end = at.last, place = t;
      if (own) {
        int64_t page = t / kPageSlots;
        place = own[page] * kPageSlots + t % kPageSlots;
        while ((page + 1) * kPageSlots < at.last && own[page + 1] == own[page] + 1) ++page;
        end = std::min(at.last, (page + 1) * kPageSlots);
      }
      f(Span{t, end}, place);
      t = end;
    }
  }

  // Prefetches the first keys of the page of slot t, in the four streams of the dot kernels: the
  // machine's own prefetching ends with a page. One query, 2048 slots, pages in random order,
  // cold: q8_0 465 -> 438 us, f16 600 -> 580; nothing with 1024 bytes of each.
  [[gnu::always_inline]] void prefetch_keys(int64_t b, int64_t kv_head, int64_t t) const {
    constexpr int64_t kStreams = 4, kBytes = 256;
    if (pages.empty() || t >= lengths[b]) return;
    const int64_t page = pages_of(b)[t / kPageSlots];
    const Weight weight = keys.weight(b, kv_head);
    for (int64_t i = 0; i < kStreams; ++i) {
      prefetch(weight.row(page * kPageSlots + i * (kPageSlots / kStreams)), kBytes);
    }
  }

  // n rows of keys or values of a sequence from slot t on as f32 [n, stride], zero beyond the
  // values of a row. Rows are prefetched kAheadBytes ahead, also those of the next page: one query,
  // 2048 slots of f16 without pages 605 -> 560 us, q8_0 430 -> 405 (Xeon with AVX-512).
  void decode(const CacheRows& rows, int64_t b, int64_t kv_head, int64_t t, int64_t n,
              int64_t stride, float* out) const {
    constexpr int64_t kAheadBytes = 2048;
    const DecodeKernel kernel = rows.kernels().decode;
    const Weight weight = rows.weight(b, kv_head);
    const int64_t* own = pages_of(b);
    const int64_t bytes = rows.row_bytes(), ahead = kAheadBytes / bytes + 1;
    const auto place = [&](int64_t slot) {
      return own ? own[slot / kPageSlots] * kPageSlots + slot % kPageSlots : slot;
    };
    for (int64_t i = t; i < t + n; ++i, out += stride) {
      if (i + ahead < lengths[b]) prefetch(weight.row(place(i + ahead)), bytes);
      kernel(weight, place(i), 0, dim, out);
      std::fill(out + dim, out + stride, 0.f);
    }
  }

  // Products of q and k become scores: capped, masked, -inf where the query does not look. s holds
  // those of the slots of `at`.
  void finish_scores(int64_t batch, int64_t head, int64_t i, Span at, float* s) const;
};

// Up to 16 queries: the context is split, and each part walked once for all queries of a head of
// keys.
void attend_split(const Attention& a, float* out);

// More queries: products with all that they see, as matrices.
void attend_matrix(const Attention& a, float* out);

}  // namespace metalmm::cpu
