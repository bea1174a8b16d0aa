#include "rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "ops/tensors.h"
#include "parallel.h"

namespace metalmm::cpu {
namespace {

// 1 / sqrt(mean(x²) + eps). Sixteen sums, which the compiler keeps in vectors.
float inverse_rms(const float* x, int64_t k, float eps) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  }
  float sum = 0;
  for (; i < k; ++i) sum += x[i] * x[i];
  for (float lane : lanes) sum += lane;
  return 1 / std::sqrt(sum / static_cast<float>(k) + eps);
}

// g null: without factors.
void normalize(const float* x, int64_t k, const float* g, float eps, float* out) {
  const float r = inverse_rms(x, k, eps);
  if (!g) {
    for (int64_t i = 0; i < k; ++i) out[i] = x[i] * r;
  } else {
    for (int64_t i = 0; i < k; ++i) out[i] = x[i] * g[i] * r;
  }
}

// Rotates the first `rotated` values of a head: its halves, or its pairs.
void rotate(const float* x, const float* cos, const float* sin, int64_t rotated, bool interleaved,
            float* out) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + half;
    out[a] = x[a] * cos[a] - x[b] * sin[a];
    out[b] = x[b] * cos[b] + x[a] * sin[b];
  }
}

}  // namespace

std::vector<float> norm_factors(const OptionalTensor& weight, double offset) {
  if (!weight.has_value()) return {};
  const at::Tensor g = weight->to(at::kFloat).contiguous();
  std::vector<float> out(elements<float>(g), elements<float>(g) + g.numel());
  for (float& v : out) v += static_cast<float>(offset);
  return out;
}

bool all_finite(const float* x, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(std::fabs(x[i]) <= std::numeric_limits<float>::max());
  return !bad;
}

at::Tensor normalized(const at::Tensor& rows, const OptionalTensor& weight, double eps,
                      double offset) {
  const int64_t m = rows.size(0), k = rows.size(1), stride = rows.stride(0);
  at::Tensor out = at::empty({m, k}, rows.options());
  if (out.numel() == 0) return out;
  const std::vector<float> g = norm_factors(weight, offset);
  const int64_t turns = g.empty() ? 1 : static_cast<int64_t>(g.size()) / k;
  const float* from = elements<float>(rows);
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, m, row_grain(k), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const float* factors = g.empty() ? nullptr : g.data() + i % turns * k;
      normalize(from + i * stride, k, factors, static_cast<float>(eps), to + i * k);
    }
  });
  return out;
}

at::Tensor finish(at::Tensor y, const OptionalTensor& bias, const OptionalTensor& residual,
                  const at::Tensor& x) {
  const int64_t m = y.size(0), n = y.size(1);
  if ((bias.has_value() || residual.has_value()) && y.numel()) {
    if (y.scalar_type() != at::kFloat) y = y.to(at::kFloat);
    at::Tensor b, r;
    if (bias.has_value()) b = bias->to(at::kFloat).contiguous();
    if (residual.has_value()) r = as_rows(*residual, at::kFloat);
    const float* add = b.defined() ? elements<float>(b) : nullptr;
    const float* beside = r.defined() ? elements<float>(r) : nullptr;
    const int64_t stride = r.defined() ? r.stride(0) : 0;
    float* to = y.mutable_data_ptr<float>();
    parallel_for(0, m, row_grain(n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        float* row = to + i * n;
        if (add) {
          for (int64_t j = 0; j < n; ++j) row[j] += add[j];
        }
        if (beside) {
          for (int64_t j = 0; j < n; ++j) row[j] += beside[i * stride + j];
        }
      }
    });
  }
  return like_input(std::move(y), x);
}

void turn_heads(const HeadsFrom& h, const Turn& t, float* to) {
  const auto position = [&](int64_t b, int64_t s, float* scratch) {
    const float* from = h.values + b * h.batch_stride + s * h.position_stride;
    const int64_t angle = b * t.angle_stride + s * t.rotated;
    if (t.normed == Normed::kWhole) {
      normalize(from, h.count * h.dim, t.factors, t.eps, scratch);
      from = scratch;
    }
    for (int64_t head = 0; head < h.count; ++head) {
      const float* values = from + head * h.dim;
      if (t.normed == Normed::kHead) {
        normalize(values, h.dim, t.factors, t.eps, scratch);
        values = scratch;
      }
      float* row = to + ((b * h.count + head) * h.positions + s) * h.dim;
      rotate(values, t.cos + angle, t.sin + angle, t.rotated, t.interleaved, row);
      std::copy(values + t.rotated, values + h.dim, row + t.rotated);
    }
  };
  parallel_for(0, h.batch * h.positions, row_grain(h.count * h.dim),
               [&](int64_t first, int64_t last) {
                 std::vector<float> scratch(t.normed == Normed::kWhole ? h.count * h.dim : h.dim);
                 for (int64_t i = first; i < last; ++i) {
                   position(i / h.positions, i % h.positions, scratch.data());
                 }
               });
}

}  // namespace metalmm::cpu
