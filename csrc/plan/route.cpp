// The pass of route.
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
  const RouteSizes& r = p.route;
  const int64_t chosen = G::kMost - r.shared;
  require(r.groups >= 1 && r.groups <= G::kMost && p.n % r.groups == 0, "groups", r.groups, "1 to ",
          G::kMost, " and divide the ", p.n, " experts");
  require(r.kept_groups >= 1 && r.kept_groups <= r.groups, "kept_groups", r.kept_groups,
          "1 to the ", r.groups, " groups");
  const int64_t size = p.n / r.groups;
  require(r.groups == 1 || r.group_best == 1 || (r.group_best == 2 && size >= 2), "group_best",
          r.group_best, "1, or 2 of groups that have 2 experts");
  require(p.k >= 1 && p.k <= chosen && p.k <= size * r.kept_groups, "k", p.k, "1 to ", chosen,
          ", of ", size * r.kept_groups, " experts");
}

Plan plan_route(const Problem& p, Reason reason) {
  constexpr auto kStrategy = StrategyId::route;
  Plan out;
  if (p.m == 0) {
    reason.add(kNoOutput);
    return out;
  }
  Pass pass = bare_pass(kStrategy, Codec::kCount, p.dtype, args_of(p));
  pass.grid = flat_grid(product(p.m, kSimdWidth), info_of(kStrategy).threads);
  pass.constants[kConstantEpilogue] = bits_of(p.route);
  out.passes.push_back(pass);
  reason.add("route: a simdgroup a token");
  return out;
}

}  // namespace metalmm
