// The pass of route.
#include <stdexcept>
#include <string>

#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

using G = RouteGeometry;

KernelArgs args_of(const Problem& p) {
  KernelArgs a{};
  a.x_stride = or_packed(p.x_stride, p.n);
  a.y_stride = or_packed(p.y_stride, 1);
  a.m = u32(p.m, "m");
  a.n = u32(p.n, "n");
  a.k = u32(p.k, "k");
  a.heads = u32(p.route.groups, "groups");
  a.kv_heads = u32(p.route.kept_groups, "kept_groups");
  a.positions = u32(p.route.group_best, "group_best");
  a.alpha = p.alpha;
  return a;
}

uint32_t bits_of(const RouteSizes& r) {
  return (r.bias ? kRouteBias : 0u) | (r.choice_bias ? kRouteChoiceBias : 0u) |
         (r.sigmoid ? kRouteSigmoid : 0u) | (r.renormalise ? kRouteRenormalise : 0u) |
         (r.groups > 1 ? kRouteGroups : 0u) | (r.shared ? kRouteShared : 0u);
}

}  // namespace

void check_route(const Problem& p) {
  const auto check = [](bool is_right, const char* name, int64_t given,
                        const std::string& allowed) {
    if (is_right) return;
    throw std::invalid_argument(name + (": " + std::to_string(given)) + "; must be " + allowed);
  };
  const RouteSizes& r = p.route;
  const std::string most = "1 to " + std::to_string(G::kMost);
  const int64_t chosen = G::kMost - r.shared;
  check(r.groups >= 1 && r.groups <= G::kMost && p.n % r.groups == 0, "groups", r.groups,
        most + " and divide the " + std::to_string(p.n) + " experts");
  check(r.kept_groups >= 1 && r.kept_groups <= r.groups, "kept_groups", r.kept_groups,
        "1 to the " + std::to_string(r.groups) + " groups");
  const int64_t size = p.n / r.groups;
  check(r.groups == 1 || r.group_best == 1 || (r.group_best == 2 && size >= 2), "group_best",
        r.group_best, "1, or 2 of groups that have 2 experts");
  check(p.k >= 1 && p.k <= chosen && p.k <= size * r.kept_groups, "k", p.k,
        "1 to " + std::to_string(chosen) + ", of " + std::to_string(size * r.kept_groups) +
            " experts");
}

Plan plan_route(const Problem& p, std::optional<StrategyId> forced, Reason reason) {
  Plan out;
  if (forced && *forced != StrategyId::route) {
    throw std::invalid_argument("strategy: " + std::string(to_string(*forced)) +
                                " does not compute route; allowed: route");
  }
  if (p.m == 0) {
    reason.add(kNoOutput);
    return out;
  }
  const StrategyInfo& s = info_of(StrategyId::route);
  Pass pass;
  pass.kernel = kernel_name(StrategyId::route, Codec::kCount, p.dtype);
  pass.grid = {u32(ceil_div(product(p.m, kSimdWidth), s.threads), "grid"), 1, 1};
  pass.threads = {static_cast<uint32_t>(s.threads), 1, 1};
  pass.threadgroup_bytes = threadgroup_bytes_of(StrategyId::route, p.dtype);
  pass.slots = s.slots;
  pass.args = args_of(p);
  pass.constants[kConstantEpilogue] = bits_of(p.route);
  u32(product(pass.grid[0], s.threads), "threads");  // kernels number them in 32 bits
  out.passes.push_back(pass);
  reason.add("route: a simdgroup a token");
  return out;
}

}  // namespace metalmm
