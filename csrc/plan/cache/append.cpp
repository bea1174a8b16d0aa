// The pass of rope_append.

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
    reject("format: no shader quantizes ", p.format->name,
           "; rope and cache_append do what rope_append does");
  }
}

Plan plan_append(const Problem& p, const Gpu& gpu, Reason reason) {
  constexpr auto kStrategy = StrategyId::rope_append;
  Plan out;
  if (p.m == 0 || p.k == 0 || heads_of(p.rope) == 0) {
    reason.add(kNoOutput);
    return out;
  }
  Pass pass = bare_pass(kStrategy, p.format->codec, p.dtype, args_of(p));
  const int64_t lanes = product(product(p.m, heads_of(p.rope)), kSimdWidth);
  pass.grid = flat_grid(lanes, info_of(kStrategy).threads);
  pass.constants[kConstantK] = pass.args.k;
  pass.constants[kConstantEpilogue] = rope_bits(p);
  check_fits("gpu", kStrategy, pass.threadgroup_bytes, gpu);
  out.passes.push_back(pass);
  reason.add("rope_append: a simdgroup a head, of k and v into the cache");
  return out;
}

}  // namespace metalmm
