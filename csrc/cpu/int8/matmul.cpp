#include "matmul.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "ops/exact_rows.h"
#include "ops/tensors.h"

namespace metalmm::cpu::int8 {
namespace {

// Rows of codes. Above, the tiles are faster although they take whole panels.
constexpr int64_t kMaxBatchedRows = 8;

// A task of gemm, as the exact one: codes of W (27 KB), of x (168 KB) and c (48 KB) share a
// second-level cache.
constexpr int64_t kTaskRows = 48;
constexpr int64_t kTaskColumns = 256;

// Bytes of W that stay in the second-level cache for rows of x beyond those of one gemv.
constexpr int64_t kSharedBytes = 1 << 18;

// Values that a thread rounds at least.
constexpr int64_t kGrainRounded = 1 << 14;

// Rows of x as panels of a layout: `rows` in each, of `parts` rows of codes.
struct Panels {
  Layout layout;
  int64_t rows, count, stride;  // stride in bytes
  Lines<uint8_t> memory;
  // From a chunk of a panel on.
  const uint8_t* at(int64_t panel, int64_t chunk, const Kind& kind) const {
    return memory.data() + panel * stride + chunk * layout.chunk_bytes(kind.sub);
  }
};

Panels pack(const at::Tensor& x, const Kind& kind, const Layout& layout, int parts,
            const ByParts<PackKernel>& kernels) {
  const int64_t m = x.size(0), chunks = x.size(1) / kChunkValues, rows = layout.rows() / parts;
  const int64_t panels = ceil_div(m, rows), stride = chunks * layout.chunk_bytes(kind.sub);
  Panels out{layout, rows, panels, stride, Lines<uint8_t>(panels * stride)};
  const PackKernel kernel = kernels[parts - 1];
  const float* from = elements<float>(x);
  const int64_t x_stride = x.stride(0);
  const int64_t grain = std::max<int64_t>(1, kGrainRounded / (kChunkValues * std::min(m, rows)));
  parallel_for(0, panels * chunks, grain, [&](int64_t first, int64_t last) {
    for (int64_t p = first / chunks; p * chunks < last; ++p) {
      kernel({from + p * rows * x_stride, x_stride, std::min(rows, m - p * rows),
              std::max<int64_t>(first - p * chunks, 0), std::min(last - p * chunks, chunks),
              kind.offset, out.memory.data() + p * stride});
    }
  });
  return out;
}

// Decoded rows of W, and what they are multiplied to.
struct Scratch {
  Lines<uint8_t> codes;
  Lines<float> scale, min, c;
  Scratch(int64_t rows, int64_t results)
      : codes(rows * kCodeStride, 0),
        scale(rows * kScaleStride, 0.f),
        min(rows * kScaleStride, 0.f),
        c(results) {}
  Decoded rows() { return {codes.data(), scale.data(), min.data()}; }
};

struct Product {
  const Weight& w;
  const CodecKernels& codec;
  const KindKernels& kind;
  int parts;
  int64_t m, n;
  float* y;
};

// A row of x [K] as gemv takes it.
struct Rounded {
  Lines<uint8_t> memory;
  RoundedRow row;
  Rounded(const float* x, int64_t k, int parts, const Kind& kind, const KindKernels& kernels)
      : memory(RoundedRow::bytes(k, parts)), row(RoundedRow::in(memory.data(), k, parts)) {
    parallel_for(0, k / kChunkValues, kGrainRounded / kChunkValues,
                 [&](int64_t first, int64_t last) {
                   kernels.round[parts - 1](x, first, last, kind.offset, row);
                 });
  }
};

void gemv(const Product& p, const at::Tensor& x) {
  std::vector<Rounded> rounded;
  std::vector<RoundedRow> rows;
  rounded.reserve(p.m);
  for (int64_t m = 0; m < p.m; ++m) {
    const float* from = elements<float>(x) + m * x.stride(0);
    rounded.emplace_back(from, p.w.k, p.parts, p.codec.kind, p.kind);
    rows.push_back(rounded.back().row);
  }
  over_rows(1, p.n, p.w.k, [&](int64_t, int64_t first, int64_t last) {
    const int64_t most = kMaxGemvCodes / p.parts;
    const int64_t block = p.m <= most ? p.n : ceil_div(kSharedBytes, p.w.row_stride);
    for (int64_t n = first; n < last; n += block) {
      for (int64_t m = 0; m < p.m; m += most) {
        const GemvKernel kernel = p.codec.gemv[p.parts - 1][std::min(most, p.m - m) - 1];
        kernel({p.w, n, std::min(n + block, last), &rows[m], p.y + m * p.n + n, p.n});
      }
    }
  });
}

// Results of the rows [first, last) of W, a tile's rows at a time, which lie apart as those of
// gemv do, with `count` panels of x.
void batched_rows(const Product& p, const Panels& x, const Tile& tile, int64_t panel, int64_t count,
                  int64_t first, int64_t last) {
  const int64_t lanes = x.layout.bytes / 4, row_lanes = p.parts * x.layout.row_lanes();
  const int64_t m0 = panel * x.rows, m1 = std::min(p.m, m0 + count * x.rows);
  Scratch scratch(tile.rows, tile.rows * count * lanes);
  const int64_t passes = ceil_div(last - first, tile.rows);
  for (int64_t i = first; i < first + passes; ++i) {
    for (int64_t k0 = 0; k0 < p.w.k; k0 += kDecodeK) {
      const int64_t k1 = std::min(p.w.k, k0 + kDecodeK);
      for (int64_t r = 0; r < tile.rows; ++r) {
        p.codec.decode(p.w, std::min(i + r * passes, last - 1), k0, k1, scratch.rows().row(r));
      }
      tile.run({scratch.rows(), x.at(panel, k0 / kChunkValues, p.codec.kind), x.stride,
                (k1 - k0) / kChunkValues, scratch.c.data(), count * lanes, k0 > 0});
    }
    for (int64_t r = 0; r < tile.rows && i + r * passes < last; ++r) {
      const float* lane = scratch.c.data() + r * count * lanes;
      for (int64_t m = m0; m < m1; ++m, lane += row_lanes) {
        p.y[m * p.n + i + r * passes] = std::accumulate(lane + 1, lane + row_lanes, lane[0]);
      }
    }
  }
}

void gemv_batched(const Product& p, const at::Tensor& x) {
  const Kernels& kernels = current_kernels();
  const bool narrow = p.m * p.parts <= kernels.narrow.rows();
  const Panels panels = narrow
                            ? pack(x, p.codec.kind, kernels.narrow, p.parts, p.kind.pack_narrow)
                            : pack(x, p.codec.kind, kernels.batched, p.parts, p.kind.pack_batched);
  const int64_t most = narrow ? 1 : kernels.batched_panels;
  for (int64_t i = 0; i < panels.count; i += most) {
    const int64_t count = std::min(most, panels.count - i);
    const Tile& tile = narrow ? p.kind.narrow : p.kind.batched[count - 1];
    parallel_for(0, p.n, weight_row_grain(p.w.k), [&](int64_t first, int64_t last) {
      batched_rows(p, panels, tile, i, count, first, last);
    });
  }
}

// y for the rows [n0, n1) of W and [m0, m1) of x, of kTaskColumns rows of codes at most.
void gemm_task(const Product& p, const Panels& x, int64_t n0, int64_t n1, int64_t m0, int64_t m1,
               Scratch& scratch) {
  const int64_t width = x.layout.rows(), most = current_kernels().gemm_panels;
  const int64_t panels = ceil_div(m1 - m0, x.rows);
  for (int64_t k0 = 0; k0 < p.w.k; k0 += kDecodeK) {
    const int64_t k1 = std::min(p.w.k, k0 + kDecodeK);
    for (int64_t r = n0; r < n1; ++r) {
      p.codec.decode(p.w, r, k0, k1, scratch.rows().row(r - n0));
    }
    for (int64_t i = 0; i < panels; i += most) {
      const int64_t count = std::min(most, panels - i);
      const Tile tile = p.kind.gemm[count - 1];
      const uint8_t* panel = x.at(m0 / x.rows + i, k0 / kChunkValues, p.codec.kind);
      for (int64_t r = 0; r < n1 - n0; r += tile.rows) {
        tile.run({scratch.rows().row(r), panel, x.stride, (k1 - k0) / kChunkValues,
                  scratch.c.data() + r * kTaskColumns + i * width, kTaskColumns, k0 > 0});
      }
    }
  }
  for (int64_t m = m0; m < m1; ++m) {
    for (int64_t r = n0; r < n1; ++r) {
      const float* c = scratch.c.data() + (r - n0) * kTaskColumns + (m - m0) * p.parts;
      p.y[m * p.n + r] = std::accumulate(c + 1, c + p.parts, c[0]);
    }
  }
}

void gemm(const Product& p, const at::Tensor& x) {
  const Panels panels = pack(x, p.codec.kind, current_kernels().gemm, p.parts, p.kind.pack_gemm);
  const int64_t row_tasks = ceil_div(p.n, kTaskRows);
  const int64_t columns = kTaskColumns / p.parts, column_tasks = ceil_div(p.m, columns);
  parallel_for(0, row_tasks * column_tasks, 1, [&](int64_t first, int64_t last) {
    Scratch scratch(kTaskRows, kTaskRows * kTaskColumns);
    for (int64_t i = first; i < last; ++i) {
      const int64_t n0 = i % row_tasks * kTaskRows, m0 = i / row_tasks * columns;
      gemm_task(p, panels, n0, std::min(p.n, n0 + kTaskRows), m0, std::min(p.m, m0 + columns),
                scratch);
    }
  });
}

Strategy choose_strategy(int64_t m, int parts) {
  if (m * parts <= kMaxGemvCodes || are_exact(m)) return Strategy::kGemv;
  return m * parts <= kMaxBatchedRows ? Strategy::kGemvBatched : Strategy::kGemm;
}

}  // namespace

void matmul(const Weight& w, const Format& format, Activations activations,
            std::optional<Strategy> strategy, const at::Tensor& x, at::Tensor& y) {
  const int64_t m = x.size(0), n = y.size(1);
  const CodecKernels& codec = current_kernels().codec[static_cast<int>(format.codec)];
  const KindKernels& kind = current_kernels().kind[codec.kind.index()];
  const int parts = activations == Activations::kInt16 ? 2 : 1;
  const Product p{w, codec, kind, parts, m, n, y.mutable_data_ptr<float>()};
  const Strategy chosen = strategy.value_or(choose_strategy(m, parts));
  if (chosen == Strategy::kGemv) {
    gemv(p, x);
  } else if (chosen == Strategy::kGemvBatched) {
    gemv_batched(p, x);
  } else {
    gemm(p, x);
  }
}

void row_products(const RowProducts& products, int64_t n, const Weight& like, const Format& format,
                  Activations activations) {
  const CodecKernels& codec = current_kernels().codec[static_cast<int>(format.codec)];
  const KindKernels& kind = current_kernels().kind[codec.kind.index()];
  const int parts = activations == Activations::kInt16 ? 2 : 1;
  std::vector<Rounded> rounded;
  rounded.reserve(products.x.size());
  for (const at::Tensor& x : products.x) {
    rounded.emplace_back(elements<float>(x), like.k, parts, codec.kind, kind);
  }
  over_rows(products.of.size(), n, like.k, [&](int64_t i, int64_t first, int64_t last) {
    const RowProducts::Product& p = products.of[i];
    Weight w = like;
    w.data = p.w;
    codec.gemv[parts - 1][0]({w, first, last, &rounded[p.x].row, p.y + first, n});
  });
}

}  // namespace metalmm::cpu::int8
