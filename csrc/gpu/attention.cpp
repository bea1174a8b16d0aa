#include "attention.h"

#include <algorithm>

#include "operands.h"
#include "ops/attention/checks.h"
#include "ops/attention/composed.h"

namespace metalmm::gpu {
namespace {

// f32 [B, kv_heads, slots, D] of the first slots of a cache.
at::Tensor decoded(const Engine& e, const at::Tensor& rows, const Format& format, int64_t slots,
                   int64_t dim) {
  const at::Tensor used = rows.narrow(2, 0, slots);
  if (used.scalar_type() != at::kByte) return used;
  if (used.numel() == 0) {
    return at::zeros({rows.size(0), rows.size(1), slots, dim}, rows.options().dtype(at::kFloat));
  }
  const at::Tensor all = used.reshape({-1, used.size(3)});
  return dequantize(e, all, format.name, dim, at::kFloat)
      .view({rows.size(0), rows.size(1), slots, dim});
}

// Rows of a cache whose values lie side by side, where shaders can read them.
at::Tensor readable(const at::Tensor& rows, const Format& format) {
  const int64_t size = rows.element_size();
  const auto aligned = [&](int64_t elements) { return elements * size % format.alignment == 0; };
  const bool fits = rows.stride(3) == 1 && aligned(rows.stride(0)) && aligned(rows.stride(1)) &&
                    aligned(rows.stride(2)) && alignment_of(rows) % format.alignment == 0;
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// Attention by the kernels of plan().
struct Call {
  Problem problem;
  Operands operands;

  Call(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
       const AttentionShape& shape, const at::Tensor& length, const AttentionOptions& options,
       int64_t slots) {
    problem.op = Op::kAttention;
    problem.n = slots;
    problem.k = q.size(3);
    problem.format = &shape.cache.keys;
    problem.dtype = dtype_of(q.scalar_type());
    problem.attention.batch = q.size(0);
    problem.attention.heads = q.size(1);
    problem.attention.kv_heads = keys.size(1);
    problem.attention.queries = q.size(2);
    problem.attention.window = options.window;
    problem.attention.scale = static_cast<float>(scale_of(options, q.size(3)));
    problem.attention.softcap = static_cast<float>(options.softcap);
    problem.attention.causal = options.causal;
    operands[kSlotX] = q.contiguous();
    operands[kSlotIds] = length;
    operands[kSlotY] = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options());
    set_cache(readable(keys, shape.cache.keys), readable(values, shape.cache.values));
    if (options.mask.has_value()) set_mask(*options.mask);
    if (options.sinks.has_value()) set_sinks(*options.sinks, q.scalar_type());
  }

  at::Tensor run(const Engine& e, std::optional<AttentionWay> way) const {
    std::optional<StrategyId> strategy;
    if (way.has_value()) {
      strategy =
          *way == AttentionWay::kSplit ? StrategyId::attention_split : StrategyId::attention_tile;
    }
    launch(e, problem, operands, strategy);
    return operands[kSlotY];
  }

 private:
  // One set of strides for both.
  void set_cache(at::Tensor keys, at::Tensor values) {
    if (keys.strides() != values.strides() || keys.element_size() != values.element_size()) {
      keys = keys.contiguous();
      values = values.contiguous();
    }
    const int64_t size = keys.element_size();
    problem.w_stride = keys.stride(2) * size;
    problem.attention.head_stride = keys.stride(1) * size;
    problem.attention.sequence_stride = keys.stride(0) * size;
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
    (is_bool ? problem.attention.bool_mask : problem.attention.float_mask) = true;
    operands[kSlotC] = mask;
  }

  void set_sinks(const at::Tensor& sinks, at::ScalarType dtype) {
    const bool same = sinks.scalar_type() == dtype;
    problem.attention.sinks = true;
    problem.attention.float_sinks = !same;
    operands[kSlotBias] = (same ? sinks : sinks.to(at::kFloat)).contiguous();
  }
};

}  // namespace

at::Tensor attention(const Engine& e, const at::Tensor& q, const at::Tensor& keys,
                     const at::Tensor& values, std::string_view format_k, std::string_view format_v,
                     const at::Tensor& length, const OptionalTensor& mask,
                     std::optional<double> scale, double softcap, int64_t window,
                     const OptionalTensor& sinks, bool causal, OptionalName strategy) {
  const AttentionOptions options{mask, scale, softcap, window, sinks, causal, strategy};
  const AttentionShape shape =
      check_attention(q, keys, values, format_k, format_v, length, options);
  if (q.is_cpu()) check_length(length, keys, mask);
  const int64_t slots = mask.has_value() ? std::min(keys.size(2), mask->size(3)) : keys.size(2);
  const bool has_kernels = shape.cache.keys.codec == shape.cache.values.codec &&
                           has_attention(shape.cache.keys, q.size(3)) && slots > 0 && q.numel() > 0;
  std::optional<AttentionWay> way = find_way(options);
  if (!way.has_value() || *way != AttentionWay::kTorch) {
    TORCH_CHECK_VALUE(!way.has_value() || has_kernels || slots == 0 || q.numel() == 0,
                      "strategy: ", *strategy, " has no kernel for heads of ", q.size(3),
                      " values of ", format_k, " and ", format_v, "; allowed: torch");
    if (has_kernels) return Call(q, keys, values, shape, length, options, slots).run(e, way);
  }
  return composed::attention(q, decoded(e, keys, shape.cache.keys, slots, q.size(3)),
                             decoded(e, values, shape.cache.values, slots, q.size(3)), length,
                             options);
}

}  // namespace metalmm::gpu
