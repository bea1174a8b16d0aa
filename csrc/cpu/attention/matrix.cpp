// Many queries: softmax(q kᵀ) v by the tile kernel of linear layers, kChunk slots at a time. Keys
// and values of a head are decoded once, into the panels that the kernel multiplies; a task takes
// kRows rows of queries through the slots that they see, and keeps the largest score, the sum of
// weights and the weighed values of each row, as flash attention does.
#include <array>

#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "scores.h"

namespace metalmm::cpu {
namespace {

// Chunks begin at multiples of kChunk, and a row's sums are its own: its result does not depend on
// the queries beside it, where values are finite. Slots that none of these sees are not read.
constexpr int64_t kChunk = kDecodeK;
// Rows of a task: queries, each with all heads of its group. A multiple of every set's tile_rows;
// scores, queries and sums of 128 values take 230 KB of the second-level cache.
constexpr int64_t kRows = 48;
constexpr int64_t kMostFloats = 1 << 23;  // decoded at a time: 32 MB, or one head

// Keys and values of one head of one sequence, of the slots of `span`.
struct Head {
  int64_t b, kv_head;
  Span span;  // begins at a multiple of kChunk
  // [slots / width][dim][width] and [dim / width][slots][width]. Elements beyond the slots or the
  // values of a row are not set, and no result has any of them.
  Lines<float> keys, values;

  Head(const Attention& a, int64_t index, int64_t width)
      : b(index / a.kv_heads), kv_head(index % a.kv_heads), span(a.seen_by(b, 0, a.queries)) {
    span.first -= span.first % kChunk;
    keys.resize(round_up(slots(), width) * a.dim);
    values.resize(round_up(a.dim, width) * slots());
  }

  int64_t slots() const { return span.last - span.first; }

  // `width` slots from span.first + t on, those that there are; rows: [width, dim] of scratch.
  void decode(const Attention& a, int64_t t, int64_t width, float* rows) {
    const int64_t n = std::min(width, slots() - t), from = span.first + t;
    a.decode(a.keys, b, kv_head, from, n, a.dim, rows);
    float* to = keys.data() + t * a.dim;
    for (int64_t d = 0; d < a.dim; ++d) {
      for (int64_t lane = 0; lane < n; ++lane) to[d * width + lane] = rows[lane * a.dim + d];
    }
    a.decode(a.values, b, kv_head, from, n, a.dim, rows);
    for (int64_t d = 0; d < a.dim; d += width) {
      const int64_t own = std::min(width, a.dim - d);
      for (int64_t i = 0; i < n; ++i) {
        std::copy_n(rows + i * a.dim + d, own, values.data() + d * slots() + (t + i) * width);
      }
    }
  }
};

// The buffers of a thread for the rows of its task.
struct Scratch {
  const IsaKernels& isa = current_isa();
  int64_t padded;                // values of a row of sums
  Lines<float> q, scores, sums;  // rows of q: [dim / kDecodeK][kRows][kDecodeStride]
  std::array<float, kRows> tops, totals;

  explicit Scratch(int64_t dim)
      : padded(round_up(dim, isa.width)),
        q(ceil_div(dim, kDecodeK) * kRows * kDecodeStride, 0.f),
        scores(kRows * kDecodeStride, 0.f),
        sums(kRows * padded) {}
};

struct Task {
  const Attention& a;
  const Head& head;
  Scratch& s;
  int64_t first, rows;  // rows of [queries, heads of the group]

  int64_t query(int64_t r) const { return (first + r) / a.group(); }
  int64_t query_head(int64_t r) const { return head.kv_head * a.group() + (first + r) % a.group(); }

  void run(float* out) const {
    begin();
    const Span seen = a.seen_by(head.b, query(0), query(rows - 1) + 1);
    for (int64_t at = seen.first / kChunk * kChunk; at < seen.last; at += kChunk) {
      const Span chunk{at, std::min(seen.last, at + kChunk)};
      multiply_keys(chunk);
      for (int64_t r = 0; r < rows; ++r) soften(r, chunk);
      weigh_values(chunk, std::max(at, seen.first));
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* y = out + ((head.b * a.queries + query(r)) * a.heads + query_head(r)) * a.dim;
      const float* sum = s.sums.data() + r * s.padded;
      const float total = s.totals[r];
      for (int64_t d = 0; d < a.dim; ++d) y[d] = total == 0 ? 0 : sum[d] / total;
    }
  }

 private:
  void begin() const {
    const float* all = elements<float>(a.q);
    for (int64_t r = 0; r < rows; ++r) {
      const float* q = all + ((head.b * a.heads + query_head(r)) * a.queries + query(r)) * a.dim;
      for (int64_t k = 0; k < a.dim; k += kDecodeK) {
        std::copy_n(q + k, std::min(kDecodeK, a.dim - k),
                    s.q.data() + (k * kRows / kDecodeK + r) * kDecodeStride);
      }
      s.tops[r] = a.sinks.empty() ? kNothing : a.sinks[query_head(r)];
      s.totals[r] = s.tops[r] == kNothing ? 0 : 1;
    }
    std::fill(s.sums.begin(), s.sums.end(), 0.f);
  }

  // f(tile kernel, row, panel) for tiles of all rows by `panels`.
  template <class F>
  void each_tile(int64_t panels, const F& f) const {
    for (int64_t p = 0; p < panels; p += s.isa.panels) {
      const TileKernel tile = s.isa.tile[std::min<int64_t>(s.isa.panels, panels - p) - 1];
      for (int64_t r = 0; r < rows; r += s.isa.tile_rows) f(tile, r, p);
    }
  }

  void multiply_keys(Span chunk) const {
    const int64_t width = s.isa.width, n = chunk.last - chunk.first;
    const float* keys = head.keys.data() + (chunk.first - head.span.first) * a.dim;
    each_tile(ceil_div(n, width), [&](TileKernel tile, int64_t r, int64_t p) {
      for (int64_t k = 0; k < a.dim; k += kDecodeK) {
        tile({s.q.data() + (k * kRows / kDecodeK + r) * kDecodeStride,
              keys + (p * a.dim + k) * width, a.dim * width, std::min(kDecodeK, a.dim - k),
              s.scores.data() + r * kDecodeStride + p * width, kDecodeStride, k > 0});
      }
    });
  }

  // Scores of a row to weights; what the row has summed is made to fit its new largest score.
  void soften(int64_t r, Span chunk) const {
    float* row = s.scores.data() + r * kDecodeStride;
    const int64_t n = chunk.last - chunk.first;
    a.finish_scores(head.b, query_head(r), query(r), chunk, row);
    const float before = s.tops[r], top = std::max(before, s.isa.attention.top(row, n));
    if (top != before) {
      const float factor = std::exp(before - top);
      float* sum = s.sums.data() + r * s.padded;
      for (int64_t d = 0; d < s.padded; ++d) sum[d] *= factor;
      s.totals[r] *= factor;
      s.tops[r] = top;
    }
    s.totals[r] += s.isa.attention.exp(row, n, top);
  }

  // The slots of the chunk from `first` on: 0 times a value that is not finite is NaN.
  void weigh_values(Span chunk, int64_t first) const {
    const int64_t width = s.isa.width, slots = head.slots();
    const float* scores = s.scores.data() + first - chunk.first;
    const float* values = head.values.data() + (first - head.span.first) * width;
    each_tile(s.padded / width, [&](TileKernel tile, int64_t r, int64_t p) {
      tile({scores + r * kDecodeStride, values + p * slots * width, slots * width,
            chunk.last - first, s.sums.data() + r * s.padded + p * width, s.padded, true});
    });
  }
};

// The i-th of `count` tasks, of which later ones see more slots: equal shares of i have about equal
// work.
int64_t balanced(int64_t i, int64_t count) { return i % 2 ? count - 1 - i / 2 : i / 2; }

}  // namespace

void attend_matrix(const Attention& a, float* out) {
  const int64_t width = current_isa().width, all = a.batch * a.kv_heads;
  TORCH_INTERNAL_ASSERT(kRows % current_isa().tile_rows == 0);
  const int64_t rows = a.queries * a.group(), tasks = ceil_div(rows, kRows);
  const int64_t floats = 2 * std::max<int64_t>(1, a.longest()) * a.dim;
  const int64_t most = std::clamp<int64_t>(kMostFloats / floats, 1, all);
  for (int64_t i = 0; i < all; i += most) {
    std::vector<Head> heads;
    for (int64_t h = i; h < std::min(all, i + most); ++h) heads.emplace_back(a, h, width);
    const int64_t panels = ceil_div(a.longest(), width);
    parallel_for(0, heads.size() * panels, 4, [&](int64_t first, int64_t last) {
      Lines<float> scratch(width * a.dim);
      for (int64_t p = first; p < last; ++p) {
        Head& head = heads[p / panels];
        const int64_t t = p % panels * width;
        if (t < head.slots()) head.decode(a, t, width, scratch.data());
      }
    });
    parallel_for(0, heads.size() * tasks, 1, [&](int64_t first, int64_t last) {
      Scratch scratch(a.dim);
      for (int64_t t = first; t < last; ++t) {
        const int64_t row = balanced(t % tasks, tasks) * kRows;
        Task{a, heads[t / tasks], scratch, row, std::min(kRows, rows - row)}.run(out);
      }
    });
  }
}

}  // namespace metalmm::cpu
