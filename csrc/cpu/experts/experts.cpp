// The ops on experts: rows of x by expert, a matrix product for each.
#include <vector>

#include "cpu/matmul.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "ops/experts/composed.h"
#include "ops/strategies.h"
#include "ops/tensors.h"

namespace metalmm::cpu {
namespace {

// The choices t C + c in the order of their experts, those of one at [first, last).
struct Group {
  int64_t expert, first, last;
};
struct Groups {
  at::Tensor order;  // int64 [T C]
  std::vector<Group> of;
};

Groups by_expert(const at::Tensor& ids, int64_t experts) {
  check_ids(ids, experts, "weight", "experts");
  const at::Tensor flat = ids.to(at::kLong).contiguous();
  const int64_t* id = elements<int64_t>(flat);
  const int64_t count = flat.numel();
  std::vector<int64_t> next(experts + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++next[id[i] + 1];
  Groups out{at::empty({count}, flat.options()), {}};
  for (int64_t e = 0; e < experts; ++e) {
    if (next[e + 1]) out.of.push_back({e, next[e], next[e] + next[e + 1]});
    next[e + 1] += next[e];
  }
  int64_t* order = out.order.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) order[next[id[i]]++] = i;
  return out;
}

// out[order[i]] = rows[i] for the choices of a group.
void scatter(const at::Tensor& rows, const Groups& groups, const Group& g, at::Tensor& out) {
  const at::Tensor from = rows.to(at::kFloat).contiguous();
  const int64_t n = out.size(1);
  const int64_t* order = elements<int64_t>(groups.order) + g.first;
  const float* values = elements<float>(from);
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, g.last - g.first, row_grain(n), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) std::copy_n(values + i * n, n, to + order[i] * n);
  });
}

// The way in which rows of x are multiplied.
struct How {
  at::ScalarType x_dtype;
  std::optional<Strategy> strategy;
  Activations activations;
};

How how_of(const at::Tensor& x, OptionalName strategy, OptionalName activations) {
  How out{x.scalar_type(), std::nullopt, check_activations(activations, x)};
  if (strategy.has_value()) {
    out.strategy = or_value_error([&] { return strategy_by_name(*strategy, out.activations); });
  }
  return out;
}

// x Wᵀ of every choice, f32 [T C, N]; x [T, K] or [T, C, K]. Where no strategy is named the experts
// of one row, of which a decoded token has a few, share a loop.
at::Tensor products(const at::Tensor& x, const PackedWeight& w, const Groups& groups,
                    int64_t choices, const How& how) {
  const at::Tensor rows = as_rows(x, x.scalar_type());
  const at::Tensor row_of =
      x.dim() == 2 && choices > 1 ? groups.order.div(choices, "floor") : groups.order;
  const int64_t n = w.rows.size(1);
  at::Tensor out = at::empty({groups.order.size(0), n}, x.options().dtype(at::kFloat));
  RowProducts single;
  int64_t last_row = -1;  // the row of x last put into `single`
  for (const Group& g : groups.of) {
    const int64_t count = g.last - g.first, row = elements<int64_t>(row_of)[g.first];
    if (count == 1 && !how.strategy && n != 0 && w.k != 0) {
      if (row != last_row) single.x.push_back(as_rows(rows.narrow(0, row, 1), at::kFloat));
      single.of.push_back(
          {single.x.size() - 1, elements<uint8_t>(w.rows) + g.expert * w.rows.stride(0),
           out.mutable_data_ptr<float>() + elements<int64_t>(groups.order)[g.first] * n});
      last_row = row;
      continue;
    }
    const at::Tensor chosen = count == 1 ? rows.narrow(0, row, 1)
                                         : rows.index_select(0, row_of.narrow(0, g.first, count));
    scatter(matmul(chosen, w.rows.select(0, g.expert), w.format, how.x_dtype, how.strategy,
                   how.activations),
            groups, g, out);
  }
  if (!single.of.empty()) {
    row_products(single, n, make_weight(w.rows.select(0, 0), w.format, w.k), w.format,
                 how.activations);
  }
  return out;
}

// y [T C, N] += bias [E, N] of each choice's expert.
void add_bias(at::Tensor& y, const OptionalTensor& bias, const at::Tensor& ids) {
  if (!bias.has_value() || !y.numel()) return;
  y.add_(bias->to(at::kFloat).index_select(0, ids.flatten().to(at::kLong)));
}

// sum over c of scores[t, c] y[t C + c], f32 [T, N]: in the order of the choices.
at::Tensor weighted(const at::Tensor& y, const at::Tensor& scores, int64_t tokens,
                    int64_t choices) {
  const int64_t n = y.size(1);
  at::Tensor out = at::zeros({tokens, n}, y.options());
  const at::Tensor s = scores.to(at::kFloat).contiguous();
  const float *score = elements<float>(s), *from = elements<float>(y);
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, tokens, row_grain(choices * n), [&](int64_t first, int64_t last) {
    for (int64_t i = first * choices; i < last * choices; ++i) {
      float* row = to + i / choices * n;
      for (int64_t j = 0; j < n; ++j) row[j] += score[i] * from[i * n + j];
    }
  });
  return out;
}

}  // namespace

at::Tensor expert_linear(const args::expert_linear& a) {
  const ExpertShape shape = check(a);
  const How how = how_of(a.x, a.strategy, a.activations);
  const PackedWeight w = packed(a.weight, shape.weight);
  const Groups groups = by_expert(a.ids, a.weight.size(0));
  const int64_t tokens = a.ids.size(0), choices = a.ids.size(1);
  at::Tensor y = products(a.x, w, groups, choices, how);
  add_bias(y, a.bias, a.ids);
  if (a.scores.has_value()) {
    y = weighted(y, *a.scores, tokens, choices);
    if (a.residual.has_value()) y.add_(a.residual->to(at::kFloat));
    return y.to(a.x.scalar_type());
  }
  return y.view({tokens, choices, y.size(1)}).to(a.x.scalar_type());
}

at::Tensor expert_swiglu(const args::expert_swiglu& a) {
  const GatedShape shape = check(a);
  const How how = how_of(a.x, a.strategy, a.activations);
  const Groups groups = by_expert(a.ids, a.weight.size(0));
  const int64_t choices = a.ids.size(1);
  at::Tensor both = products(a.x, packed(a.weight, shape.experts.weight), groups, choices, how);
  if (a.up_weight.has_value()) {
    const PackedWeight up = packed(*a.up_weight, shape.experts.weight);
    both = at::cat({both, products(a.x, up, groups, choices, how)}, 1);
  }
  add_bias(both, a.bias, a.ids);
  const auto [gate, up] = composed::halves_of(both, 1, a.interleaved);
  const at::Tensor y = composed::gated(gate, up, shape.gate);
  return stored(y.view({a.ids.size(0), choices, y.size(1)}), a.x.scalar_type());
}

at::Tensor expert_input_grad(const args::expert_input_grad& a) {
  const PackedWeight w = packed(a.weight, check(a).weight);
  const Groups groups = by_expert(a.ids, a.weight.size(0));
  const at::Tensor rows = as_rows(a.grad, at::kFloat);
  at::Tensor out = at::empty({rows.size(0), w.k}, rows.options());
  for (const Group& g : groups.of) {
    const at::Tensor of_group =
        rows.index_select(0, groups.order.narrow(0, g.first, g.last - g.first));
    const at::Tensor experts_rows = w.rows.select(0, g.expert);
    scatter(times_decoded(of_group, w.k,
                          [&](int64_t first, int64_t last) {
                            return decode_rows(experts_rows, w.format, w.k, first, last);
                          }),
            groups, g, out);
  }
  return out.view({a.grad.size(0), a.grad.size(1), w.k}).to(a.grad.scalar_type());
}

}  // namespace metalmm::cpu
