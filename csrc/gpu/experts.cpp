// The ops on experts, by shaders: a product for each choice, or rows by expert in tiles.
#include "operands.h"
#include "ops/exact_rows.h"
#include "ops/experts/composed.h"
#include "ops/strategies.h"

namespace metalmm::gpu {
namespace {

// f(expert, choices) for each expert that ids name, choices int64 on the device of ids: t C + c of
// those that do. Waits for the device.
template <class F>
void each_expert(const at::Tensor& ids, int64_t experts, const F& f) {
  const at::Tensor flat = ids.flatten().to(at::kLong).clamp(0, experts - 1);
  const auto [sorted, order] = flat.sort(/*stable=*/true, 0, false);
  const at::Tensor counts = at::bincount(sorted.to(at::kCPU), {}, experts);
  const int64_t* count = elements<int64_t>(counts);
  for (int64_t expert = 0, first = 0; expert < experts; first += count[expert++]) {
    if (count[expert]) f(expert, order.narrow(0, first, count[expert]));
  }
}

// The choices of a call: ids int64 [T C], in range or on a device, where kernels take the nearest.
struct Choices {
  at::Tensor ids;
  int64_t tokens, choices, experts;
  bool share_rows;  // the choices of a token, of a row of x

  int64_t count() const { return tokens * choices; }
};

Choices choices_of(const at::Tensor& x, const at::Tensor& ids, int64_t experts) {
  check_ids(ids, experts, "weight", "experts");
  return {ids.to(at::kLong).contiguous().flatten(), ids.size(0), ids.size(1), experts,
          x.dim() == 2};
}

// W of experts [E, N, row_bytes], copied where a view begins between the words that shaders load.
at::Tensor aligned_experts(const PackedWeight& w) {
  const int64_t alignment = w.format.alignment;
  const bool is_aligned = w.rows.numel() == 0 ||
                          (alignment_of(w.rows) % alignment == 0 &&
                           w.rows.stride(0) % alignment == 0 && w.rows.stride(1) % alignment == 0);
  return is_aligned ? w.rows : w.rows.clone(at::MemoryFormat::Contiguous);
}

// Rows of x on experts, but for m, operands and what is of the op.
Problem expert_problem(Op op, const at::Tensor& rows, const PackedWeight& w, const Choices& of) {
  Problem p = problem(op, rows);
  p.n = w.rows.size(1);
  p.k = w.k;
  p.format = &w.format;
  p.x_alignment = alignment_of(rows);
  p.experts.experts = of.experts;
  p.experts.sharing = of.share_rows ? of.choices : 1;
  return p;
}

// The operand of a slot, kSlotWeight or kSlotWeight2, and its strides.
void bind_experts(Problem& p, Operands& o, Slot slot, const PackedWeight& w) {
  const at::Tensor rows = o[slot] = aligned_experts(w);
  // Strides of a tensor without elements mean nothing.
  const bool is_empty = rows.numel() == 0;
  const int64_t row = is_empty || rows.size(1) == 1 ? rows.size(2) : rows.stride(1);
  const int64_t expert = is_empty || rows.size(0) == 1 ? row * rows.size(1) : rows.stride(0);
  (slot == kSlotWeight ? p.w_stride : p.w2_stride) = row;
  (slot == kSlotWeight ? p.experts.stride : p.experts.stride2) = expert;
  const int64_t of_stride = (expert | 16) & -(expert | 16);
  p.w_alignment = std::min({p.w_alignment, alignment_of(rows), of_stride});
}

// Rows of x in the order of their experts, each expert's from a multiple of tile_rows on.
struct Tiles {
  int64_t rows;        // rows of a tile
  at::Tensor experts;  // int64 [tiles]: -1 for a tile of none
  at::Tensor choices;  // int64 [tiles rows]: the choice of a row; of a row of none, any
  at::Tensor places;   // int64 [T C]: the row of a choice
};

// By torch's ops, without a wait: there are as many tiles as there may be at most.
Tiles tiles_of(const Choices& of) {
  const int64_t count = of.count(), rows = expert_tile_rows(count, of.experts);
  const int64_t most = (count + std::min(count, of.experts) * (rows - 1)) / rows;
  const auto options = of.ids.options();
  const auto [sorted, order] = of.ids.clamp(0, of.experts - 1).sort(/*stable=*/true, 0, false);
  const at::Tensor first = at::searchsorted(sorted, at::arange(of.experts + 1, options));
  const at::Tensor begin = first.narrow(0, 0, of.experts);
  const at::Tensor tiles =
      (first.narrow(0, 1, of.experts) - begin + (rows - 1)).div_(rows, "floor");
  const at::Tensor end = tiles.cumsum(0);
  Tiles out{rows, at::searchsorted(end, at::arange(most, options), false, /*right=*/true), {}, {}};
  out.experts.masked_fill_(out.experts.eq(of.experts), -1);
  const at::Tensor shift = (end - tiles).mul_(rows).sub_(begin);
  const at::Tensor to = shift.index_select(0, sorted).add_(at::arange(count, options));
  out.choices = at::zeros({most * rows}, options).scatter_(0, to, order);
  out.places = at::empty({count}, options).scatter_(0, order, to);
  return out;
}

// x Wᵀ of every choice, f32 [T C, N], in tiles.
at::Tensor in_tiles(const Engine& e, const at::Tensor& rows, const PackedWeight& w,
                    const Choices& of, const Tiles& tiles) {
  const at::Tensor from = of.share_rows ? tiles.choices.div(of.choices, "floor") : tiles.choices;
  Operands o;
  o[kSlotX] = rows.index_select(0, from);
  Problem p = expert_problem(Op::kExpertTiles, o[kSlotX], w, of);
  p.m = from.size(0);
  p.experts.tile_rows = tiles.rows;
  p.y_f32 = true;
  bind_experts(p, o, kSlotWeight, w);
  o[kSlotIds] = tiles.experts;
  o[kSlotY] = at::empty({p.m, p.n}, rows.options().dtype(at::kFloat));
  launch(e, p, o);
  return o[kSlotY].index_select(0, tiles.places);
}

// y [T C, N] with the bias of the experts.
at::Tensor with_bias(const at::Tensor& y, const OptionalTensor& bias, const Choices& of) {
  if (!bias.has_value()) return y;
  return y + bias->to(at::kFloat).index_select(0, of.ids.clamp(0, of.experts - 1));
}

bool is_tiled(const Choices& of, std::optional<StrategyId> strategy) {
  return strategy ? *strategy == StrategyId::expert_gemm
                  : !are_exact(of.tokens) && experts_are_tiled(of.count(), of.experts);
}

}  // namespace

at::Tensor expert_linear(const Engine& e, const args::expert_linear& a) {
  const at::Tensor& x = a.x;
  const OptionalTensor &bias = a.bias, &scores = a.scores;
  const ExpertShape shape = check(a);
  check_activations(a.activations, x);
  const auto asked =
      find_expert_strategy(a.strategy, x, scores.has_value() ? Op::kExpertDown : Op::kExpertLinear);
  const Choices of = choices_of(x, a.ids, a.weight.size(0));
  const PackedWeight w = packed(a.weight, shape.weight);
  const int64_t n = a.weight.size(1), results = scores.has_value() ? of.tokens : of.count();
  const auto shaped = [&](const at::Tensor& y) {
    return scores.has_value() ? y : y.view({of.tokens, of.choices, n});
  };
  if (of.count() == 0) {
    return a.residual.has_value() ? a.residual->to(x.scalar_type(), false, /*copy=*/true)
                                  : shaped(at::zeros({results, n}, x.options()));
  }
  if (is_tiled(of, asked)) {
    const at::Tensor rows = as_rows(x, x.scalar_type());
    at::Tensor y = with_bias(in_tiles(e, rows, w, of, tiles_of(of)), bias, of);
    if (scores.has_value()) {
      y = (y.view({of.tokens, of.choices, n}) * scores->to(at::kFloat).unsqueeze(2)).sum(1);
      if (a.residual.has_value()) y.add_(a.residual->to(at::kFloat));
    }
    return stored(shaped(y), x.scalar_type());
  }
  Operands o;
  o[kSlotX] = as_rows(x, common_dtype(x, {bias, a.residual}));
  const at::ScalarType dtype = o[kSlotX].scalar_type();
  Problem p =
      expert_problem(scores.has_value() ? Op::kExpertDown : Op::kExpertLinear, o[kSlotX], w, of);
  p.m = results;
  if (scores.has_value()) {
    p.experts.choices = of.choices;
    p.experts.float_scores = scores->scalar_type() != dtype || dtype == at::kFloat;
    o[kSlotX2] = addend(scores, p.experts.float_scores ? at::kFloat : dtype);
    o[kSlotC] = addend(a.residual, dtype);
    p.has_c = a.residual.has_value();
    p.beta = p.has_c ? 1 : 0;
  }
  bind_experts(p, o, kSlotWeight, w);
  o[kSlotIds] = of.ids;
  o[kSlotBias] = addend(bias, dtype);
  p.has_bias = bias.has_value();
  o[kSlotY] = at::empty({results, n}, o[kSlotX].options());
  launch(e, p, o);
  return shaped(o[kSlotY]).to(x.scalar_type());
}

at::Tensor expert_swiglu(const Engine& e, const args::expert_swiglu& a) {
  const at::Tensor &x = a.x, &weight = a.weight;
  const OptionalTensor &bias = a.bias, &up_weight = a.up_weight;
  const GatedShape shape = check(a);
  check_activations(a.activations, x);
  const auto asked = find_expert_strategy(a.strategy, x, Op::kExpertUp);
  const Choices of = choices_of(x, a.ids, weight.size(0));
  const WeightShape& rows_of = shape.experts.weight;
  const int64_t n = rows_of.n.expect_int();
  const auto shaped = [&](const at::Tensor& y) { return y.view({of.tokens, of.choices, n}); };
  if (of.count() == 0) return shaped(at::zeros({0, n}, x.options()));
  if (is_tiled(of, asked)) {
    const at::Tensor rows = as_rows(x, x.scalar_type());
    const Tiles tiles = tiles_of(of);
    at::Tensor both = in_tiles(e, rows, packed(weight, rows_of), of, tiles);
    if (up_weight.has_value()) {
      both = at::cat({both, in_tiles(e, rows, packed(*up_weight, rows_of), of, tiles)}, 1);
    }
    const auto [gate, up] = composed::halves_of(with_bias(both, bias, of), 1, a.interleaved);
    return stored(shaped(composed::gated(gate, up, shape.gate).contiguous()), x.scalar_type());
  }
  // Two views of one weight, their rows apart or every other one.
  composed::GateUp parts = up_weight.has_value() ? composed::GateUp{weight, *up_weight}
                                                 : composed::halves_of(weight, 1, a.interleaved);
  const PackedWeight gate = packed(parts.gate, rows_of), up = packed(parts.up, rows_of);
  Operands o;
  o[kSlotX] = as_rows(x, common_dtype(x, {bias}));
  Problem p = expert_problem(Op::kExpertUp, o[kSlotX], gate, of);
  p.m = of.count();
  p.activation = shape.gate.activation;
  p.experts.is_oai = shape.gate.is_oai;
  p.experts.limit = static_cast<float>(shape.gate.limit.value_or(0));
  p.experts.alpha = static_cast<float>(shape.gate.alpha);
  p.experts.alternates = a.interleaved;
  bind_experts(p, o, kSlotWeight, gate);
  bind_experts(p, o, kSlotWeight2, up);
  o[kSlotIds] = of.ids;
  o[kSlotBias] = addend(bias, o[kSlotX].scalar_type());
  p.has_bias = bias.has_value();
  o[kSlotY] = at::empty({p.m, n}, o[kSlotX].options());
  launch(e, p, o);
  return shaped(o[kSlotY]).to(x.scalar_type());
}

namespace {

// The logits of route: of all experts in slot x, of a shared one, f32, in slot c. A simdgroup a
// token would read W slowly: its product is a pass of the whole device.
void bind_logits(const Engine& e, const args::route& a, const RouteShape& shape, Operands& o) {
  const at::Tensor x = as_rows(a.x, a.x.scalar_type());
  o[kSlotX] = x;
  o[kSlotC] = addend(a.shared, at::kFloat);
  if (!shape.weight) return;
  const auto logits = [&](const at::Tensor& weight, const WeightShape& of) {
    return product(e, x, packed(weight, of), at::kFloat);
  };
  const OptionalTensor both = with_shared_row(a);
  o[kSlotX] = logits(both.has_value() ? *both : *a.weight, *shape.weight);
  if (both.has_value()) {
    const int64_t n = o[kSlotX].size(1) - 1;
    o[kSlotC] = o[kSlotX].narrow(1, n, 1);
    o[kSlotX] = o[kSlotX].narrow(1, 0, n);
  } else if (shape.shared_weight) {
    o[kSlotC] = logits(*a.shared_weight, *shape.shared_weight);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> route(const Engine& e, const args::route& a) {
  const RouteShape shape = check(a);
  Operands o;
  bind_logits(e, a, shape, o);
  o[kSlotBias] = addend(a.bias, at::kFloat);
  o[kSlotX2] = addend(a.choice_bias, at::kFloat);
  const auto size = {a.x.size(0), shape.choices};
  o[kSlotY] = at::empty(size, a.x.options().dtype(at::kFloat));
  o[kSlotY2] = at::empty(size, a.x.options().dtype(at::kLong));
  Problem p = problem(Op::kRoute, o[kSlotX]);
  p.n = shape.experts.expect_int();
  p.k = a.top_k;
  if (o[kSlotC].defined()) p.y_stride = row_stride(o[kSlotC]);
  p.alpha = static_cast<float>(a.scale);
  p.route = {a.groups,
             a.kept_groups,
             a.group_best,
             shape.is_sigmoid,
             a.renormalise,
             a.bias.has_value(),
             a.choice_bias.has_value(),
             o[kSlotC].defined()};
  launch(e, p, o);
  return {o[kSlotY], o[kSlotY2]};
}

at::Tensor expert_input_grad(const Engine& e, const args::expert_input_grad& a) {
  const int64_t in_features = check(a).weight.k.expect_int();
  check_ids(a.ids, a.weight.size(0), "weight", "experts");
  const at::Tensor rows = as_rows(a.grad, at::kFloat);
  at::Tensor out = at::empty({rows.size(0), in_features}, rows.options());
  each_expert(a.ids, a.weight.size(0), [&](int64_t expert, const at::Tensor& chosen) {
    out.index_copy_(0, chosen,
                    linear_input_grad(e, args::linear_input_grad{rows.index_select(0, chosen),
                                                                 a.weight.select(0, expert),
                                                                 a.format, in_features}));
  });
  return out.view({a.grad.size(0), a.grad.size(1), in_features}).to(a.grad.scalar_type());
}

}  // namespace metalmm::gpu
