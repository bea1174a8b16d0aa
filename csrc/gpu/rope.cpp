// rope, and what is written to a cache: by one kernel where a shader quantizes the format.
#include <algorithm>

#include "operands.h"
#include "ops/attention/checks.h"
#include "ops/attention/composed.h"
#include "ops/attention/memory.h"
#include "ops/composed.h"

namespace metalmm::gpu {
namespace {

// cos or sin in `dtype`, of one sequence where the batch repeats it.
at::Tensor angles(const at::Tensor& t, bool repeats, at::ScalarType dtype) {
  return (repeats ? t.narrow(0, 0, 1) : t).to(dtype).contiguous();
}

// A kernel that walks over heads: rope's operands but for where k and v go, or those of rows that
// are only written.
struct RopeCall {
  Problem problem;
  Operands operands;

  // The arguments are checked; `dtype` is that of the kernel.
  RopeCall(Op op, const RopeShape& shape, const args::rope& options, at::ScalarType dtype) {
    const at::Tensor &qkv = options.qkv, &cos = options.cos, &sin = options.sin;
    const int64_t batch = qkv.size(0), positions = qkv.size(1), dim = shape.dim.expect_int();
    const bool same = cos.scalar_type() == dtype && sin.scalar_type() == dtype;
    const bool repeats = cos.size(0) > 1 && cos.stride(0) == 0 && sin.stride(0) == 0;
    operands[kSlotX] = as_rows(qkv, dtype);
    if (options.v.has_value()) operands[kSlotX2] = as_rows(*options.v, dtype);
    operands[kSlotCos] = angles(cos, repeats, same ? dtype : at::kFloat);
    operands[kSlotSin] = angles(sin, repeats, same ? dtype : at::kFloat);
    operands[kSlotNorm] = addend(options.q_norm, dtype);
    operands[kSlotNorm2] = addend(options.k_norm, dtype);
    operands[kSlotY] =
        at::empty({batch, options.heads, positions, dim}, operands[kSlotX].options());
    set(op, dtype, dim);
    problem.x_stride = row_stride(operands[kSlotX]);
    if (options.v.has_value()) problem.x2_stride = row_stride(operands[kSlotX2]);
    problem.eps = static_cast<float>(options.eps);
    problem.offset = static_cast<float>(options.offset);
    problem.rope = {options.heads,
                    options.kv_heads,
                    cos.size(2),
                    std::max<int64_t>(positions, 1),
                    operands[kSlotCos].size(0) * positions,
                    options.q_norm.has_value(),
                    options.k_norm.has_value(),
                    options.interleaved,
                    shape.has_whole_norms,
                    options.v_norm,
                    options.v.has_value(),
                    !same};
  }

  // k and v [B, kv_heads, S, D] as they are.
  RopeCall(const at::Tensor& k, const at::Tensor& v, at::ScalarType dtype) {
    const auto dense = [&](const at::Tensor& t) {
      const at::Tensor x = t.to(dtype);
      return x.stride(3) == 1 ? x : x.contiguous();
    };
    const at::Tensor x = operands[kSlotX] = dense(k), x2 = operands[kSlotX2] = dense(v);
    const int64_t positions = k.size(2);
    set(Op::kRopeAppend, dtype, k.size(3));
    problem.m = k.size(0) * positions;
    problem.x_stride = x.stride(2);
    problem.x2_stride = x2.stride(2);
    problem.append.x_head_stride = x.stride(1);
    problem.append.x_sequence_stride = x.stride(0);
    problem.append.x2_head_stride = x2.stride(1);
    problem.append.x2_sequence_stride = x2.stride(0);
    problem.rope.heads = 0;
    problem.rope.kv_heads = k.size(1);
    problem.rope.positions = problem.rope.angle_rows = positions;
    problem.rope.v_apart = true;
  }

  // `given` names a cache and its slots.
  template <class Args>
  void write(const Args& given, const CacheShape& cache) {
    const at::Tensor &keys = given.keys, &values = given.values;
    const auto bytes = [](const at::Tensor& t, int64_t d) {
      return t.size(d) > 1 ? t.stride(d) * t.element_size() : 0;
    };
    operands[kSlotWeight] = keys;
    operands[kSlotWeight2] = values;
    operands[kSlotIds] = given.slots.contiguous();
    if (!operands[kSlotY].defined()) operands[kSlotY] = keys;  // not written: no heads of q
    problem.format = &cache.values;
    problem.n = keys.size(2);
    problem.w_stride = bytes(keys, 2);
    problem.w2_stride = bytes(values, 2);
    AppendSizes& a = problem.append;
    a.half_keys = has_half_keys(cache.keys, cache.values);
    a.rotated_keys = cache.rotated_keys;
    a.rotated_values = cache.rotated_values;
    a.pages = given.slots.dim() == 2;
    a.head_stride = bytes(keys, 1);
    a.head2_stride = bytes(values, 1);
    a.sequence_stride = bytes(keys, 0);
    a.sequence2_stride = bytes(values, 0);
    problem.w_alignment = std::min(alignment_of(keys), alignment_of(values));
  }

 private:
  void set(Op op, at::ScalarType dtype, int64_t dim) {
    problem.op = op;
    problem.m = operands[kSlotX].size(0);
    problem.k = dim;
    problem.dtype = dtype_of(dtype);
  }
};

// Whether rope_append writes this cache: formats that it has, of which a shader finds every row at
// an address that it can write.
bool is_written_by_a_kernel(const at::Tensor& keys, const at::Tensor& values,
                            const CacheShape& shape) {
  const int64_t alignment = shape.alignment();
  const auto fits = [=](const at::Tensor& rows) {
    bool out = alignment_of(rows) % alignment == 0 && rows.stride(3) == 1;
    for (int64_t d = 0; d < 3; ++d) {
      out = out && (rows.size(d) == 1 || rows.stride(d) * rows.element_size() % alignment == 0);
    }
    return out;
  };
  return is_pair_of_kernels(shape.keys, shape.values) && has_append(shape.values) &&
         keys.numel() > 0 && fits(keys) && fits(values);
}

// Rows [B, kv_heads, S, D] as those of the cache: packed, or of its dtype.
at::Tensor as_rows_of(const at::Tensor& cache, const at::Tensor& rows, const Format& format,
                      bool is_rotated) {
  if (cache.scalar_type() != at::kByte) return rows.to(cache.scalar_type());
  const at::Tensor values = is_rotated ? composed::hadamard(rows) : rows.to(at::kFloat);
  const at::Tensor x = values.reshape({-1, rows.size(3)});
  at::Tensor packed = composed::quantize(x, format);
  if (!packed.defined()) packed = quantize(args::quantize{x, format.name});
  return packed.view({rows.size(0), rows.size(1), rows.size(2), cache.size(3)});
}

}  // namespace

Heads rope(const Engine& e, const args::rope& a) {
  RopeCall call(Op::kRope, check(a), a, common_dtype(a.qkv, {a.v, a.q_norm, a.k_norm}));
  Operands& o = call.operands;
  for (Slot slot : {kSlotY2, kSlotY3}) {
    o[slot] =
        at::empty({a.qkv.size(0), a.kv_heads, a.qkv.size(1), call.problem.k}, o[kSlotX].options());
  }
  launch(e, call.problem, o);
  const auto out = [&](Slot slot) { return o[slot].to(a.qkv.scalar_type()); };
  return {out(kSlotY), out(kSlotY2), out(kSlotY3)};
}

std::tuple<at::Tensor, at::Tensor> rope_tables(const Engine& e, const args::rope_tables& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  check(a);
  if (a.axes.has_value()) check_ids(*a.axes, a.positions.size(0), "positions", "rows", "axes");
  const int64_t dims = a.positions.dim(), count = a.inv_freq.size(0);
  const int64_t batch = a.positions.size(dims - 2), length = a.positions.size(dims - 1);
  Operands o;
  o[kSlotIds] = a.positions.contiguous();
  o[kSlotNorm] = a.inv_freq.contiguous();
  if (a.axes.has_value()) o[kSlotX2] = a.axes->contiguous();
  for (Slot slot : {kSlotY, kSlotY2}) {
    o[slot] =
        at::empty({batch, length, count * (a.twice ? 2 : 1)}, a.inv_freq.options().dtype(type));
  }
  Problem p;
  p.op = Op::kRopeTables;
  p.m = batch * length;
  p.k = count;
  p.dtype = dtype_of(type);
  p.alpha = static_cast<float>(a.scale);
  p.tables = {dims == 3 ? a.positions.size(0) : 1, a.twice, a.interleaved, a.axes.has_value()};
  launch(e, p, o);
  return {o[kSlotY], o[kSlotY2]};
}

// Slots on a device are not checked, which would wait for it; nor are those of cache_append.
at::Tensor rope_append(const Engine& e, const args::rope_append& a) {
  const RopeAppendShape shape = check(a);
  check_memory(a);
  check_slots(a.slots, a.keys);
  const args::rope of = rope_of(a);
  const at::ScalarType dtype = a.qkv.scalar_type();
  // In f32 k and v would be packed before they are rounded to the dtype of qkv.
  const bool is_rounded_once = common_dtype(a.qkv, {a.v, a.q_norm, a.k_norm}) == dtype;
  if (!is_rounded_once || !is_written_by_a_kernel(a.keys, a.values, shape.cache)) {
    const auto [q, k, v] = rope(e, of);
    cache_append(e, args::cache_append{a.keys, a.values, k, v, a.slots, a.format_k, a.format_v});
    return q;
  }
  RopeCall call(Op::kRopeAppend, shape.rope, of, dtype);
  call.write(a, shape.cache);
  launch(e, call.problem, call.operands);
  return call.operands[kSlotY];
}

void cache_append(const Engine& e, const args::cache_append& a) {
  const CacheShape shape = check(a);
  check_memory(a);
  check_slots(a.slots, a.keys);
  if (a.k.numel() == 0) return;
  if (is_written_by_a_kernel(a.keys, a.values, shape)) {
    RopeCall call(a.k, a.v, common_dtype(a.k, {a.v}));
    call.write(a, shape);
    launch(e, call.problem, call.operands);
    return;
  }
  const at::Tensor new_keys = as_rows_of(a.keys, a.k, shape.keys, shape.rotated_keys);
  const at::Tensor new_values = as_rows_of(a.values, a.v, shape.values, shape.rotated_values);
  const at::Tensor slots = a.slots.flatten();
  const auto put = [&](at::Tensor rows, at::Tensor added) {
    if (a.slots.dim() == 2) added = added.transpose(0, 1).flatten(1, 2).unsqueeze(0);
    rows.index_copy_(2, slots, added);
  };
  put(a.keys, new_keys);
  put(a.values, new_values);
}

}  // namespace metalmm::gpu
