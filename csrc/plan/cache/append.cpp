// The pass of rope_append.
#include <stdexcept>
#include <string>

#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

KernelArgs args_of(const Problem& p) {
  const RopeSizes& r = p.rope;
  const AppendSizes& c = p.append;
  KernelArgs a{};
  const int64_t heads_of_x = heads_of(r) - (r.v_apart ? r.kv_heads : 0);
  a.x_stride = or_packed(p.x_stride, product(heads_of_x, p.k));
  a.x2_stride = or_packed(p.x2_stride, product(r.kv_heads, p.k));
  a.x_head_stride = or_packed(c.x_head_stride, p.k);
  a.x2_head_stride = or_packed(c.x2_head_stride, p.k);
  a.x_sequence_stride = or_packed(c.x_sequence_stride, product(a.x_stride, r.positions));
  a.x2_sequence_stride = or_packed(c.x2_sequence_stride, product(a.x2_stride, r.positions));
  a.w_stride = or_packed(p.w_stride, c.half_keys ? 2 * p.k : p.format->row_bytes(p.k));
  a.head_stride = or_packed(c.head_stride, product(a.w_stride, p.n));
  a.sequence_stride = or_packed(c.sequence_stride, product(a.head_stride, r.kv_heads));
  a.w2_stride = or_packed(p.w2_stride, p.format->row_bytes(p.k));
  a.head2_stride = or_packed(c.head2_stride, product(a.w2_stride, p.n));
  a.sequence2_stride = or_packed(c.sequence2_stride, product(a.head2_stride, r.kv_heads));
  a.m = u32(p.m, "m");
  a.n = u32(p.n, "n");
  a.k = u32(p.k, "k");
  a.count = u32(r.angle_rows, "count");
  a.heads = u32(r.heads, "heads");
  a.kv_heads = u32(r.kv_heads, "kv_heads");
  a.rotated = u32(r.rotated, "rotated");
  a.positions = u32(r.positions, "positions");
  a.eps = p.eps;
  a.offset = p.offset;
  return a;
}

}  // namespace

bool has_append(const Format& format) { return is_stored(format.codec); }

void check_append(const Problem& p) {
  if (!has_append(*p.format)) {
    throw std::invalid_argument("format: no shader quantizes " + p.format->name +
                                "; rope and cache_append do what rope_append does");
  }
}

Plan plan_append(const Problem& p, const Gpu& gpu, std::optional<StrategyId> forced,
                 Reason reason) {
  Plan out;
  if (forced && *forced != StrategyId::rope_append) {
    throw std::invalid_argument("strategy: " + std::string(to_string(*forced)) +
                                " does not compute rope_append; allowed: rope_append");
  }
  if (p.m == 0 || p.k == 0 || heads_of(p.rope) == 0) {
    reason.add(kNoOutput);
    return out;
  }
  const StrategyInfo& s = info_of(StrategyId::rope_append);
  const int64_t lanes = product(product(p.m, heads_of(p.rope)), kSimdWidth);
  Pass pass;
  pass.kernel = kernel_name(StrategyId::rope_append, p.format->codec, p.dtype);
  pass.grid = {u32(ceil_div(lanes, s.threads), "grid"), 1, 1};
  pass.threads = {static_cast<uint32_t>(s.threads), 1, 1};
  pass.threadgroup_bytes = threadgroup_bytes_of(StrategyId::rope_append, p.dtype);
  pass.slots = s.slots;
  pass.args = args_of(p);
  pass.constants[kConstantK] = pass.args.k;
  pass.constants[kConstantEpilogue] = rope_bits(p);
  if (pass.threadgroup_bytes > gpu.max_threadgroup_memory) {
    throw std::invalid_argument("gpu: rope_append needs " + std::to_string(pass.threadgroup_bytes) +
                                " bytes of threadgroup memory; this GPU has " +
                                std::to_string(gpu.max_threadgroup_memory));
  }
  u32(product(pass.grid[0], s.threads), "threads");  // kernels number them in 32 bits
  out.passes.push_back(pass);
  reason.add("rope_append: a simdgroup a head, of k and v into the cache");
  return out;
}

}  // namespace metalmm
