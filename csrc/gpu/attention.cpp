// attention by shaders; where they have none, by torch's ops and dequantize.
#include <algorithm>
#include <utility>
#include <vector>

#include "operands.h"
#include "ops/attention/checks.h"
#include "ops/attention/composed.h"
#include "ops/attention/sdpa.h"
#include "plan/passes.h"

namespace metalmm::gpu {
namespace {

// Rows [B, kv_heads, T, row] as values [B, kv_heads, T, D]; packed ones in this dtype.
at::Tensor decoded(const Engine& e, const at::Tensor& rows, const Format& format, int64_t dim,
                   at::ScalarType dtype) {
  if (rows.scalar_type() != at::kByte) return rows;
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = dim;
  if (rows.numel() == 0) return at::zeros(sizes, rows.options().dtype(dtype));
  return dequantize(e, args::dequantize{rows.reshape({-1, rows.size(3)}), format.name, dim, dtype})
      .view(sizes);
}

// Rows of a cache whose values lie side by side, where shaders can read them.
at::Tensor readable(const at::Tensor& rows, int64_t alignment) {
  const int64_t size = rows.element_size();
  const auto aligned = [&](int64_t elements) { return elements * size % alignment == 0; };
  const bool fits = rows.stride(3) == 1 && aligned(rows.stride(0)) && aligned(rows.stride(1)) &&
                    aligned(rows.stride(2)) && alignment_of(rows) % alignment == 0;
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// Attention by the kernels of plan().
struct Call {
  Problem problem;
  Operands operands;

  Call(Problem asked, const args::attention& a, const AttentionShape& shape)
      : problem(std::move(asked)) {
    const at::Tensor& q = a.q;
    problem.format = &shape.cache.values;
    problem.attention.half_keys = has_half_keys(shape.cache.keys, shape.cache.values);
    operands[kSlotX] = q.contiguous();
    if (a.length.has_value()) operands[kSlotIds] = a.length->contiguous();
    if (a.pages.has_value()) operands[kSlotX2] = a.pages->contiguous();
    operands[kSlotY] = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options());
    const int64_t alignment = shape.cache.alignment();
    set_cache(readable(a.keys, alignment), readable(a.values, alignment));
    if (a.mask.has_value()) set_mask(*a.mask);
    if (a.sinks.has_value()) set_sinks(*a.sinks, q.scalar_type());
  }

  at::Tensor run(const Engine& e, std::optional<AttentionWay> way) const {
    std::optional<StrategyId> strategy;
    if (way == AttentionWay::kSplit) strategy = StrategyId::attention_split;
    if (way == AttentionWay::kTile) strategy = StrategyId::attention_tile;
    launch(e, problem, operands, strategy);
    return operands[kSlotY];
  }

 private:
  void set_cache(const at::Tensor& keys, const at::Tensor& values) {
    AttentionSizes& a = problem.attention;
    const auto bytes = [](const at::Tensor& t, int64_t d) {
      return t.stride(d) * t.element_size();
    };
    problem.w_stride = bytes(keys, 2);
    problem.w2_stride = bytes(values, 2);
    a.head_stride = bytes(keys, 1);
    a.head2_stride = bytes(values, 1);
    a.sequence_stride = a.pages ? 0 : bytes(keys, 0);  // pages are of all sequences
    a.sequence2_stride = a.pages ? 0 : bytes(values, 0);
    problem.x_alignment = alignment_of(operands[kSlotX]);
    problem.w_alignment = std::min(alignment_of(keys), alignment_of(values));
    operands[kSlotWeight] = keys;
    operands[kSlotWeight2] = values;
  }

  void set_mask(const at::Tensor& given) {
    const bool is_bool = given.scalar_type() == at::kBool;
    at::Tensor mask = is_bool ? given : given.to(at::kFloat);
    if (mask.stride(3) != 1) mask = mask.contiguous();
    const auto stride = [&](int64_t d) { return mask.size(d) == 1 ? 0 : mask.stride(d); };
    problem.attention.mask_sequence_stride = stride(0);
    problem.attention.mask_head_stride = stride(1);
    problem.attention.mask_stride = stride(2);
    operands[kSlotC] = mask;
  }

  void set_sinks(const at::Tensor& sinks, at::ScalarType dtype) {
    const bool same = sinks.scalar_type() == dtype;
    problem.attention.float_sinks = !same;
    operands[kSlotBias] = (same ? sinks : sinks.to(at::kFloat)).contiguous();
  }
};

// Attention on a cache in pages, by copies of the slots of each sequence.
at::Tensor by_sequence(const args::attention& a, int64_t slots) {
  if (a.q.size(0) == 0) return at::empty_like(a.q.transpose(1, 2));
  const at::Tensor within = at::arange(kPageSlots, a.pages->options());
  std::vector<at::Tensor> out;
  for (int64_t b = 0; b < a.q.size(0); ++b) {
    const at::Tensor pages = a.pages->select(0, b).clamp(0, a.keys.size(2) / kPageSlots - 1);
    const at::Tensor at = (pages.unsqueeze(1) * kPageSlots + within).flatten().narrow(0, 0, slots);
    const at::Tensor q = a.q.narrow(0, b, 1), length = a.length->select(0, b);
    out.push_back(call(args::attention{q, a.keys.index_select(2, at), a.values.index_select(2, at),
                                       a.format_k, a.format_v, length, std::nullopt, a.scale,
                                       a.softcap, a.window, a.sinks, a.causal, a.strategy}));
  }
  return at::cat(out);
}

}  // namespace

// A length is not checked, where there is one: the slots that are read are those below it that the
// cache and the mask have.
at::Tensor attention(const Engine& e, const args::attention& a) {
  const Tensor &q = a.q, &keys = a.keys, &values = a.values;
  const AttentionShape shape = check(a);
  if (shape.cache.is_rotated()) {
    return attend_rotated(
        a, shape.cache, [&](const at::Tensor& t) { return hadamard(e, args::hadamard{t}); },
        [&](const args::attention& plain) { return attention(e, plain); });
  }
  if (q.is_cpu() && a.length.has_value()) check_lengths(a);
  check_page_numbers(a);
  const int64_t capacity = a.pages.has_value() ? a.pages->size(1) * kPageSlots : keys.size(2);
  const int64_t slots = a.mask.has_value() ? std::min(capacity, a.mask->size(3)) : capacity;
  const bool has_kernels = is_pair_of_kernels(shape.cache.keys, shape.cache.values) &&
                           has_attention(shape.cache.values, q.size(3)) && slots > 0 &&
                           q.numel() > 0;
  std::optional<AttentionWay> way = find_way(a);
  if (a.pages.has_value() &&
      (!has_kernels || way == AttentionWay::kTorch || way == AttentionWay::kSdpa)) {
    return by_sequence(a, slots);
  }
  const Problem problem = attention_problem(a, shape, slots, !a.length.has_value());
  const bool is_exact = problem.exact_rows;
  TORCH_CHECK_VALUE(!is_exact || (has_kernels && !way.has_value()) || slots == 0 || q.numel() == 0,
                    "exact rows: heads of ", q.size(3), " values of ", a.format_k, " and ",
                    a.format_v, " have no kernel, or a strategy is named");
  if (way == AttentionWay::kSdpa ||
      (!way.has_value() && !is_exact && sdpa_pays(problem, e.gpu(q.device())))) {
    const auto decode = [&](const at::Tensor& rows, const Format& format) {
      return decoded(e, rows, format, q.size(3), q.scalar_type());
    };
    const at::Tensor y = composed::sdpa(problem, a, {keys, shape.cache.keys},
                                        {values, shape.cache.values}, a.length, decode);
    if (y.defined()) return y;
    way = AttentionWay::kTile;  // plan() would name sdpa
  }
  const bool is_kernel_forced = a.strategy.has_value() && way != AttentionWay::kTorch;
  TORCH_CHECK_VALUE(!is_kernel_forced || has_kernels || slots == 0 || q.numel() == 0,
                    "strategy: ", a.strategy.value_or(""), " has no kernel for heads of ",
                    q.size(3), " values of ", a.format_k, " and ", a.format_v,
                    "; allowed: torch, sdpa");
  if (has_kernels && way != AttentionWay::kTorch) {
    return Call(problem, a, shape).run(e, way);
  }
  const auto first = [&](const at::Tensor& rows, const Format& format) {
    return decoded(e, rows.narrow(2, 0, slots), format, q.size(3), at::kFloat);
  };
  return composed::attention(a, first(keys, shape.cache.keys), first(values, shape.cache.values));
}

}  // namespace metalmm::gpu
