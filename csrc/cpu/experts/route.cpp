// route, in f32: tokens are shared among threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "metal/geometry.h"
#include "ops/experts/checks.h"
#include "ops/tensors.h"

namespace metalmm::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The scores of a token, in place of its logits.
void score(float* row, int64_t n, bool is_sigmoid) {
  if (is_sigmoid) {
    for (int64_t e = 0; e < n; ++e) row[e] = 1 / (1 + std::exp(-row[e]));
    return;
  }
  const float most = *std::max_element(row, row + n);
  float total = 0;
  for (int64_t e = 0; e < n; ++e) total += row[e] = std::exp(row[e] - most);
  for (int64_t e = 0; e < n; ++e) row[e] /= total;
}

// Puts the k ids of the largest keys first, of equal keys the lowest id.
void best(const float* keys, std::vector<int64_t>& ids, int64_t k) {
  std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), [&](int64_t a, int64_t b) {
    return keys[a] > keys[b] || (keys[a] == keys[b] && a < b);
  });
}

// The experts of the groups that are chosen from.
std::vector<int64_t> experts_of(const args::route& a, const std::vector<float>& keys) {
  const auto n = static_cast<int64_t>(keys.size()), size = n / a.groups;
  std::vector<float> sums(a.groups);
  std::vector<int64_t> groups(a.groups), ids;
  for (int64_t g = 0; g < a.groups; ++g) {
    float first = -kInfinity, second = -kInfinity;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, keys[e]));
      first = std::max(first, keys[e]);
    }
    groups[g] = g;
    sums[g] = a.group_best == 2 ? first + second : first;
  }
  if (a.groups > 1) best(sums.data(), groups, a.kept_groups);
  for (int64_t i = 0; i < a.kept_groups; ++i) {
    for (int64_t e = groups[i] * size; e < (groups[i] + 1) * size; ++e) ids.push_back(e);
  }
  return ids;
}

// The logits of all experts, which may be rows of a wider tensor, and those of a shared one.
struct Logits {
  at::Tensor routed;
  OptionalTensor shared;
};

Logits logits_of(const args::route& a, const RouteShape& shape) {
  const at::Tensor x = stored(a.x, at::kFloat);
  if (!shape.weight) return {x, a.shared};
  const auto product = [&](const at::Tensor& weight, Name format) {
    return linear(args::linear{x, weight, std::nullopt, format});
  };
  if (const OptionalTensor both = with_shared_row(a)) {
    const at::Tensor logits = product(*both, a.format);
    const int64_t n = logits.size(1) - 1;
    return {logits.narrow(1, 0, n), logits.narrow(1, n, 1)};
  }
  if (!shape.shared_weight) return {product(*a.weight, a.format), a.shared};
  return {product(*a.weight, a.format), product(*a.shared_weight, a.shared_format)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> route(const args::route& a) {
  const RouteShape shape = check(a);
  const auto [logits, shared] = logits_of(a, shape);
  if (a.bias.has_value()) logits.add_(a.bias->to(at::kFloat));
  const OptionalTensor& given = a.choice_bias;
  const at::Tensor offsets = given.has_value() ? given->to(at::kFloat).contiguous() : at::Tensor();
  const float* offset = given.has_value() ? elements<float>(offsets) : nullptr;
  const int64_t tokens = logits.size(0), n = logits.size(1), k = a.top_k;
  const int64_t width = shape.choices, stride = logits.stride(0);
  at::Tensor weights = at::empty({tokens, width}, logits.options());
  at::Tensor ids = at::empty({tokens, width}, logits.options().dtype(at::kLong));
  if (shared.has_value()) {
    weights.narrow(1, k, 1).copy_(shared->to(at::kFloat).sigmoid());
    ids.narrow(1, k, 1).fill_(n);
  }
  float *rows = logits.mutable_data_ptr<float>(), *w = weights.mutable_data_ptr<float>();
  auto* id = ids.mutable_data_ptr<int64_t>();
  const bool by_logits = !given.has_value() && a.groups == 1;
  const auto scale = static_cast<float>(a.scale);
  parallel_for(0, tokens, std::max<int64_t>(1, 2048 / n), [&](int64_t begin, int64_t end) {
    std::vector<float> keys(n);
    for (int64_t t = begin; t < end; ++t) {
      float* row = rows + t * stride;
      if (by_logits) std::copy(row, row + n, keys.begin());
      score(row, n, shape.is_sigmoid);
      for (int64_t e = 0; e < n; ++e) {
        if (!by_logits) keys[e] = row[e] + (offset ? offset[e] : 0);
        if (std::isnan(keys[e])) keys[e] = kInfinity;
      }
      std::vector<int64_t> from = experts_of(a, keys);
      best(keys.data(), from, k);
      float sum = 1;
      if (a.renormalise) {
        sum = kRouteLeast;
        for (int64_t c = 0; c < k; ++c) sum += row[from[c]];
      }
      for (int64_t c = 0; c < k; ++c) {
        id[t * width + c] = from[c];
        w[t * width + c] = row[from[c]] / sum * scale;
      }
    }
  });
  return {weights, ids};
}

}  // namespace metalmm::cpu
