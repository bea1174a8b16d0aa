#include "matmul.h"

#include <algorithm>
#include <string>
#include <vector>

#include "dense.h"
#include "int8/matmul.h"
#include "lines.h"
#include "ops/exact_rows.h"
#include "ops/tensors.h"
#include "parallel.h"
#include "plan/names.h"

namespace metalmm::cpu {
namespace {

// Where the register kernels stop paying: they take 8 rows of x at a time, a tile of two panels
// costs 32 rows whole. Zen 4, q4_0 4096 x 4096: M = 24 takes 4.5 ms as three times 8 rows, 5.4 ms
// as a tile.
constexpr int64_t kMaxBatchedRows = 24;

// A task of gemm: kTaskRows rows of W by kTaskColumns rows of x, kDecodeK values of K at a time.
// Decoded W (100 KB), x (512 KB) and c (48 KB) share a second-level cache of 1 MB.
constexpr int64_t kTaskRows = 48;
constexpr int64_t kTaskColumns = 256;

// A dot kernel and x [M, K] in the order that it takes, for the rows of kDotRows[index].
struct Prepared {
  DotKernel kernel;
  Lines<float> x;

  Prepared(const CodecKernels& codec, const at::Tensor& from, int index, bool in_steps)
      : kernel(codec.dot[index]) {
    const int64_t m = from.size(0), k = from.size(1), rows = kDotRows[index];
    const StepKernels& steps = codec.steps;
    const int64_t n_steps = in_steps && steps.values > 0 ? k / steps.values : 0;
    const int64_t done = n_steps * steps.values, floats = n_steps * steps.step_floats * rows;
    const float* rows_of_x = elements<float>(from);
    x.resize(floats + rows * round_up(k - done, kChunkValues));
    if (n_steps > 0) {
      kernel = steps.dot[index];
      steps.arrange({rows_of_x, from.stride(0), m, k, rows, x.data()});
    }
    interleave(rows_of_x + done, from.stride(0), m, k - done, rows, current_isa().width,
               x.data() + floats);
  }
};

// y[:, first .. last) for at most kMaxDotRows rows of x.
void dot_rows(const CodecKernels& codec, const Weight& w, const at::Tensor& x, at::Tensor y,
              bool in_steps) {
  const int64_t m = x.size(0), n = y.size(1);
  const int index =
      static_cast<int>(std::lower_bound(kDotRows, kDotRows + kNumDotKernels, m) - kDotRows);
  const int64_t rows = kDotRows[index];
  const Prepared prepared(codec, x, index, in_steps);
  const DotKernel kernel = prepared.kernel;
  const float* packed = prepared.x.data();
  float* out = y.mutable_data_ptr<float>();
  const int64_t out_stride = y.stride(0);
  over_rows(1, n, w.k, [&](int64_t, int64_t first, int64_t last) {
    if (rows == m) {
      kernel({w, first, last, packed, out + first, out_stride});
      return;
    }
    std::vector<float> padded(rows * (last - first));
    kernel({w, first, last, packed, padded.data(), last - first});
    for (int64_t r = 0; r < m; ++r) {
      std::copy_n(padded.data() + r * (last - first), last - first, out + r * out_stride + first);
    }
  });
}

// x [M, K] as panels of `width` rows: x[p * width + lane, k] at (p * K + k) * width + lane, zero
// beyond M.
Lines<float> pack_panels(const at::Tensor& x, int width) {
  const int64_t m = x.size(0), k = x.size(1), stride = x.stride(0);
  const int64_t panels = ceil_div(m, width);
  Lines<float> out(panels * k * width);
  const float* from = elements<float>(x);
  parallel_for(0, panels, std::max<int64_t>(1, 4096 / std::max<int64_t>(k, 1)),
               [&](int64_t first, int64_t last) {
                 for (int64_t p = first; p < last; ++p) {
                   float* to = out.data() + p * k * width;
                   for (int64_t i = 0; i < k; ++i) {
                     for (int64_t lane = 0; lane < width; ++lane) {
                       const int64_t row = p * width + lane;
                       to[i * width + lane] = row < m ? from[row * stride + i] : 0.f;
                     }
                   }
                 }
               });
  return out;
}

struct Gemm {
  const IsaKernels& isa;
  const CodecKernels& codec;
  const Weight& w;
  const float* x;  // panels
  int64_t m, n;
  float* y;

  // y for rows [n0, n1) of W and rows [m0, m1) of x; c and decoded are scratch.
  void task(int64_t n0, int64_t n1, int64_t m0, int64_t m1, float* c, float* decoded) const {
    const int64_t first_panel = m0 / isa.width;
    const int64_t panels = ceil_div(m1 - m0, isa.width);
    for (int64_t k0 = 0; k0 < w.k; k0 += kDecodeK) {
      const int64_t k1 = std::min(w.k, k0 + kDecodeK);
      for (int64_t r = n0; r < n1; ++r) {
        codec.decode(w, r, k0, k1, decoded + (r - n0) * kDecodeStride);
      }
      for (int64_t p = 0; p < panels; p += isa.panels) {
        const TileKernel tile = isa.tile[std::min<int64_t>(isa.panels, panels - p) - 1];
        const float* panel = x + ((first_panel + p) * w.k + k0) * isa.width;
        for (int64_t r = 0; r < n1 - n0; r += isa.tile_rows) {
          tile({decoded + r * kDecodeStride, panel, w.k * isa.width, k1 - k0,
                c + r * kTaskColumns + p * isa.width, kTaskColumns, k0 > 0});
        }
      }
    }
    for (int64_t i = m0; i < m1; ++i) {
      for (int64_t r = n0; r < n1; ++r) y[i * n + r] = c[(r - n0) * kTaskColumns + i - m0];
    }
  }
};

void run_gemm(const CodecKernels& codec, const Weight& w, const at::Tensor& x, at::Tensor y) {
  const IsaKernels& isa = current_isa();
  const int64_t m = x.size(0), n = y.size(1);
  const Lines<float> panels = pack_panels(x, isa.width);
  const Gemm job{isa, codec, w, panels.data(), m, n, y.mutable_data_ptr<float>()};
  const int64_t row_tasks = ceil_div(n, kTaskRows);
  const int64_t column_tasks = ceil_div(m, kTaskColumns);
  parallel_for(0, row_tasks * column_tasks, 1, [&](int64_t first, int64_t last) {
    Lines<float> c(kTaskRows * kTaskColumns), decoded(kTaskRows * kDecodeStride, 0.f);
    for (int64_t i = first; i < last; ++i) {
      const int64_t n0 = i % row_tasks * kTaskRows, m0 = i / row_tasks * kTaskColumns;
      job.task(n0, std::min(n, n0 + kTaskRows), m0, std::min(m, m0 + kTaskColumns), c.data(),
               decoded.data());
    }
  });
}

}  // namespace

void interleave(const float* x, int64_t x_stride, int64_t m, int64_t k, int64_t rows, int width,
                float* out) {
  const int64_t padded = round_up(k, kChunkValues);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t v = 0; v < padded; v += width) {
      float* to = out + v * rows + r * width;
      const int64_t n = r < m ? std::clamp<int64_t>(k - v, 0, width) : 0;
      std::copy_n(x + r * x_stride + v, n, to);
      std::fill_n(to + n, width - n, 0.f);
    }
  }
}

Strategy strategy_by_name(std::string_view name, Activations activations) {
  const bool exact = activations == Activations::kExact;
  const int count = exact ? sizeof kStrategyNames / sizeof *kStrategyNames : int8::kNumStrategies;
  return static_cast<Strategy>(find_name(
      "strategy", name, count, [](int i) { return kStrategyNames[i]; },
      exact ? " on cpu" : " on cpu with rounded activations"));
}

Strategy choose_strategy(int64_t m, at::ScalarType dtype) {
  if (m <= kMaxStepRows || are_exact(m)) return Strategy::kGemvSteps;
  if (m <= kMaxBatchedRows) return Strategy::kGemvBatched;
  return dense_is_faster(dtype) ? Strategy::kDense : Strategy::kGemm;
}

Weight make_weight(const at::Tensor& w, const Format& format, int64_t k) {
  return make_weight(elements<uint8_t>(w), w.stride(0), format, k);
}

at::Tensor matmul(const at::Tensor& rows, const at::Tensor& w, const Format& format,
                  at::ScalarType x_dtype, std::optional<Strategy> strategy,
                  Activations activations) {
  const int64_t m = rows.size(0), n = w.size(0);
  const bool rounds = activations != Activations::kExact && int8::has_codes(format);
  const Strategy chosen = strategy.value_or(choose_strategy(m, x_dtype));
  if (chosen == Strategy::kDense && !rounds) return dense(as_rows(rows, x_dtype), w, format);
  const at::Tensor x = as_rows(rows, at::kFloat);
  at::Tensor y = at::empty({m, n}, x.options());
  if (m == 0 || n == 0) return y;
  if (x.size(1) == 0) return y.zero_();
  const CodecKernels& codec = kernels_of(format);
  const Weight weight = make_weight(w, format, x.size(1));
  if (rounds) {
    int8::matmul(weight, format, activations, strategy, x, y);
    return y;
  }
  if (chosen == Strategy::kGemm) {
    run_gemm(codec, weight, x, y);
    return y;
  }
  if (chosen == Strategy::kGemmTiled || chosen == Strategy::kGemmNaive) {
    (chosen == Strategy::kGemmTiled ? gemm_tiled : gemm_naive)(codec.decode, weight, x, y);
    return y;
  }
  const bool in_steps = chosen == Strategy::kGemvSteps;
  // A format without steps adds in one order, whatever the number of rows is.
  const bool has_steps = in_steps && codec.steps.values > 0;
  const int64_t most = has_steps ? kMaxStepRows : chosen == Strategy::kGemv ? 1 : kMaxDotRows;
  for (int64_t i = 0; i < m; i += most) {
    const int64_t rows = std::min(most, m - i);
    const auto part = [&](const at::Tensor& t) { return rows == m ? t : t.narrow(0, i, rows); };
    dot_rows(codec, weight, part(x), part(y), in_steps);
  }
  return y;
}

void row_products(const RowProducts& products, int64_t n, const Weight& like, const Format& format,
                  Activations activations) {
  if (activations != Activations::kExact && int8::has_codes(format)) {
    return int8::row_products(products, n, like, format, activations);
  }
  const CodecKernels& codec = kernels_of(format);
  std::vector<Prepared> prepared;
  prepared.reserve(products.x.size());
  for (const at::Tensor& x : products.x) prepared.emplace_back(codec, x, 0, true);
  over_rows(products.of.size(), n, like.k, [&](int64_t i, int64_t first, int64_t last) {
    const RowProducts::Product& p = products.of[i];
    Weight w = like;
    w.data = p.w;
    prepared[p.x].kernel({w, first, last, prepared[p.x].x.data(), p.y + first, n});
  });
}

at::Tensor decode_rows(const at::Tensor& w, const Format& format, int64_t k, int64_t first,
                       int64_t last) {
  at::Tensor out = at::empty({last - first, k}, w.options().dtype(at::kFloat));
  const Weight weight = make_weight(w, format, k);
  const DecodeKernel decode = kernels_of(format).decode;
  float* data = out.mutable_data_ptr<float>();
  parallel_for(first, last, weight_row_grain(k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) decode(weight, r, 0, k, data + (r - first) * k);
  });
  return out;
}

}  // namespace metalmm::cpu
