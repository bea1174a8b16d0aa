// The pass of gated_delta.
#include <stdexcept>
#include <string>

#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

using G = GatedDeltaGeometry;

KernelArgs args_of(const Problem& p) {
  const DeltaSizes& d = p.delta;
  KernelArgs a{};
  const int64_t values = product(product(d.key_heads, 2), p.k) + product(d.heads, p.n);
  a.x_stride = or_packed(p.x_stride, values);
  a.x2_stride = or_packed(p.x2_stride, d.heads);
  a.y_stride = or_packed(p.y_stride, d.heads);
  a.m = u32(p.m, "m");
  a.n = u32(p.n, "n");
  a.k = u32(p.k, "k");
  a.heads = u32(d.heads, "heads");
  a.kv_heads = u32(d.key_heads, "key_heads");
  a.positions = u32(d.positions, "positions");
  a.eps = p.eps;
  u32(values, "values of a row of x");
  return a;
}

}  // namespace

void check_delta(const Problem& p) {
  const auto reject = [](const char* name, int64_t given, const std::string& allowed) {
    throw std::invalid_argument(name + (": " + std::to_string(given)) + "; must be " + allowed);
  };
  const DeltaSizes& d = p.delta;
  constexpr int64_t kMost = G::kRowLanes * G::kMostRows;
  if (p.k < 1 || p.k > kMost) reject("k", p.k, "1 to " + std::to_string(kMost));
  if (p.n % 4) reject("n", p.n, "a multiple of 4");
  if (d.key_heads < 1) reject("key_heads", d.key_heads, "at least 1");
  if (d.heads < 1 || d.heads % d.key_heads) {
    reject("heads", d.heads, "a multiple of the " + std::to_string(d.key_heads) + " key_heads");
  }
  if (d.positions < 1 || p.m % d.positions) {
    reject("positions", d.positions, "a divisor of the " + std::to_string(p.m) + " rows of x");
  }
}

Plan plan_delta(const Problem& p, std::optional<StrategyId> forced, Reason reason) {
  Plan out;
  if (forced && *forced != StrategyId::gated_delta) {
    throw std::invalid_argument("strategy: " + std::string(to_string(*forced)) +
                                " does not compute gated_delta; allowed: gated_delta");
  }
  if (p.m == 0 || p.n == 0) {
    reason.add(kNoOutput);
    return out;
  }
  const StrategyInfo& s = info_of(StrategyId::gated_delta);
  const int64_t heads = product(p.m / p.delta.positions, p.delta.heads);
  const int64_t lanes = product(product(heads, ceil_div(p.n, G::kColumns)), kSimdWidth);
  Pass pass;
  pass.kernel = kernel_name(StrategyId::gated_delta, Codec::kCount, p.dtype);
  pass.grid = {u32(ceil_div(lanes, s.threads), "grid"), 1, 1};
  pass.threads = {static_cast<uint32_t>(s.threads), 1, 1};
  pass.threadgroup_bytes = threadgroup_bytes_of(StrategyId::gated_delta, p.dtype);
  pass.slots = s.slots;
  pass.args = args_of(p);
  pass.constants[kConstantK] = pass.args.k;
  pass.constants[kConstantEpilogue] = p.delta.float_heads ? kDeltaFloatHeads : 0u;
  u32(product(pass.grid[0], s.threads), "threads");  // kernels number them in 32 bits
  out.passes.push_back(pass);
  reason.add("gated_delta: a simdgroup ", G::kColumns, " columns of the state of a head");
  return out;
}

}  // namespace metalmm
