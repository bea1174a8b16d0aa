// The passes of causal_conv, of gated_delta and of ssm_scan.
#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

using G = GatedDeltaGeometry;
using C = CausalConvGeometry;
using S = SsmScanGeometry;

void check_positions(const Problem& p, int64_t positions) {
  require(positions >= 1 && p.m % positions == 0, "positions", positions, "a divisor of the ", p.m,
          " rows of x");
}

// `values` of a row of x, `gates` of one of x2 and of c.
KernelArgs args_of(const Problem& p, int64_t values, int64_t gates, int64_t positions) {
  KernelArgs a{};
  a.x_stride = or_packed(p.x_stride, values);
  a.x2_stride = or_packed(p.x2_stride, gates);
  a.y_stride = or_packed(p.y_stride, gates);
  a.m = u32(p.m, "m");
  a.n = u32(p.n, "n");
  a.k = u32(p.k, "k");
  a.positions = u32(positions, "positions");
  u32(values, "values of a row of x");
  return a;
}

// The parts of a launch in which the ops differ.
struct Launch {
  KernelArgs args;
  uint32_t bits;          // kConstantEpilogue
  int64_t threads;        // threads of the grid
  int threadgroup_bytes;  // 0: none
};

int size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

Launch launch_of_conv(const Problem& p, Reason& reason) {
  const ConvSizes& c = p.conv;
  Launch out{args_of(p, p.n, p.n, c.positions), 0, 0, 0};
  out.args.count = u32(c.width, "width");
  out.bits = (c.bias ? kConvBias : 0u) | (c.silu ? kConvSilu : 0u) |
             (c.float_weight ? kConvFloatWeight : 0u);
  const int64_t chunks = ceil_div(c.positions, C::kPositions);
  out.threads = product(product(p.m / c.positions, chunks), p.n);
  reason.add("causal_conv: a thread ", C::kPositions, " positions of a channel");
  return out;
}

Launch launch_of_delta(const Problem& p, Reason& reason) {
  const DeltaSizes& d = p.delta;
  const int64_t values = product(product(d.key_heads, 2), p.k) + product(d.heads, p.n);
  Launch out{args_of(p, values, d.heads, d.positions), 0, 0, 0};
  out.args.heads = u32(d.heads, "heads");
  out.args.kv_heads = u32(d.key_heads, "key_heads");
  out.args.eps = p.eps;
  out.bits = d.float_heads ? kDeltaFloatHeads : 0u;
  const int64_t heads = product(p.m / d.positions, d.heads);
  out.threads = product(product(heads, ceil_div(p.n, G::kGroupColumns)), G::kThreads);
  out.threadgroup_bytes = G::threadgroup_bytes(static_cast<int>(p.k), size_of(p.dtype));
  reason.add("gated_delta: a simdgroup ", G::kColumns, " columns of the state of a head");
  return out;
}

Launch launch_of_ssm(const Problem& p, Reason& reason) {
  const SsmSizes& s = p.ssm;
  const int64_t values = product(s.heads, p.n);
  Launch out{args_of(p, values + product(product(s.groups, 2), p.k), s.heads, s.positions), 0, 0,
             0};
  out.args.y_stride = or_packed(p.y_stride, values);
  out.args.heads = u32(s.heads, "heads");
  out.args.kv_heads = u32(s.groups, "groups");
  out.args.alpha = s.dt_min;
  out.args.beta = s.dt_max;
  out.bits = (s.float_heads ? kSsmFloatHeads : 0u) | (p.has_gate ? kSsmGate : 0u);
  const int64_t heads = product(p.m / s.positions, s.heads);
  out.threads = product(product(heads, ceil_div(p.n, S::kGroupRows)), S::kThreads);
  out.threadgroup_bytes = S::threadgroup_bytes(static_cast<int>(p.k), size_of(p.dtype));
  reason.add("ssm_scan: a simdgroup ", S::kRows, " rows of the state of a head");
  return out;
}

Launch launch_of(const Problem& p, Reason& reason) {
  if (p.op == Op::kCausalConv) return launch_of_conv(p, reason);
  return p.op == Op::kGatedDelta ? launch_of_delta(p, reason) : launch_of_ssm(p, reason);
}

}  // namespace

void check_conv(const Problem& p) {
  require(p.k >= 1 && p.k <= C::kMostTaps, "k", p.k, "1 to ", C::kMostTaps);
  require(p.conv.width >= p.k - 1, "width", p.conv.width, "k - 1 or more");
  check_positions(p, p.conv.positions);
}

void check_delta(const Problem& p) {
  const DeltaSizes& d = p.delta;
  constexpr int64_t kMost = G::kRowLanes * G::kMostRows;
  require(p.k >= 1 && p.k <= kMost, "k", p.k, "1 to ", kMost);
  require(p.n % 4 == 0, "n", p.n, "a multiple of 4");
  require(d.key_heads >= 1, "key_heads", d.key_heads, "at least 1");
  require(d.heads >= 1 && d.heads % d.key_heads == 0, "heads", d.heads, "a multiple of the ",
          d.key_heads, " key_heads");
  check_positions(p, d.positions);
}

void check_ssm(const Problem& p) {
  const SsmSizes& s = p.ssm;
  require(p.k >= 4 && p.k <= S::kMostValues && p.k % 4 == 0, "k", p.k, "a multiple of 4 up to ",
          S::kMostValues);
  require(s.groups >= 1, "groups", s.groups, "at least 1");
  require(s.heads >= 1 && s.heads % s.groups == 0, "heads", s.heads, "a multiple of the ", s.groups,
          " groups");
  check_positions(p, s.positions);
}

Plan plan_recurrent(const Problem& p, Reason reason) {
  const StrategyId strategy = strategies_of(p.op).front();
  Plan out;
  if (p.m == 0 || p.n == 0) {
    reason.add(kNoOutput);
    return out;
  }
  const Launch launch = launch_of(p, reason);
  Pass pass = bare_pass(strategy, Codec::kCount, p.dtype, launch.args);
  pass.grid = flat_grid(launch.threads, info_of(strategy).threads);
  pass.threadgroup_bytes = bound_bytes(launch.threadgroup_bytes);
  pass.constants[kConstantK] = pass.args.k;
  pass.constants[kConstantEpilogue] = launch.bits;
  out.passes.push_back(pass);
  return out;
}

}  // namespace metalmm
