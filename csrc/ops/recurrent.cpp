#include "recurrent.h"

#include <utility>

#include "checks.h"
#include "metal/geometry.h"

namespace metalmm {

using Size = c10::SymInt;

namespace {

// Rows of positions, and a state of heads on their device.
void check_state(const char* name, const Tensor& rows, const Tensor& state, const char* shape) {
  check_activation_dtype(name, rows);
  TORCH_CHECK_VALUE(rows.dim() == 3, name, ": shape ", rows.sym_sizes(),
                    "; must be [B, S, values]");
  check_device("state", state, rows);
  TORCH_CHECK_VALUE(state.scalar_type() == at::kFloat && state.dim() == 4,
                    "state: ", state.scalar_type(), " ", state.sym_sizes(), "; must be float32 ",
                    shape);
}

}  // namespace

void check(const args::causal_conv& a) {
  const Tensor &x = a.x, &state = a.state, &weight = a.weight;
  check_activation_dtype("x", x);
  TORCH_CHECK_VALUE(x.dim() == 3, "x: shape ", x.sym_sizes(), "; must be [B, S, C]");
  const Size batch = x.sym_size(0), channels = x.sym_size(2);
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) >= 1 &&
                        weight.sym_size(1) <= int64_t{CausalConvGeometry::kMostTaps},
                    "weight: shape ", weight.sym_sizes(), "; must be [", channels, ", taps], 1 to ",
                    int64_t{CausalConvGeometry::kMostTaps}, " taps");
  const Size taps = weight.sym_size(1);
  check_addend("weight", weight, {channels, taps}, x);
  check_addend("bias", a.bias, {channels}, x);
  check_device("state", state, x);
  TORCH_CHECK_VALUE(state.scalar_type() == x.scalar_type() && state.dim() == 3 &&
                        state.sym_size(0) == batch && state.sym_size(1) == channels &&
                        state.sym_size(2) >= taps - 1,
                    "state: ", state.scalar_type(), " ", state.sym_sizes(), "; must be ",
                    x.scalar_type(), " [", batch, ", ", channels, ", at least ", taps - 1, "]");
  TORCH_CHECK_VALUE(!a.activation.has_value() || *a.activation == "silu", "activation: '",
                    a.activation.value_or(""), "'; allowed: None, 'silu'");
}

DeltaShape check(const args::gated_delta& a) {
  const Tensor &qkv = a.qkv, &state = a.state;
  check_state("qkv", qkv, state, "[B, heads, dk, dv]");
  const Size batch = qkv.sym_size(0), values = qkv.sym_size(2);
  const Size heads = state.sym_size(1), dk = state.sym_size(2), dv = state.sym_size(3);
  constexpr int64_t kMost = GatedDeltaGeometry::kRowLanes * GatedDeltaGeometry::kMostRows;
  TORCH_CHECK_VALUE(
      state.sym_size(0) == batch && heads >= 1 && dk >= 1 && dk <= kMost && dv >= 4 && dv % 4 == 0,
      "state: shape ", state.sym_sizes(), "; must be [", batch, ", heads, dk, dv], dk 1 to ", kMost,
      ", dv a multiple of 4");
  const Size keys = values - heads * dv, key_heads = keys / (dk * 2);
  TORCH_CHECK_VALUE(keys > 0 && key_heads * dk * 2 == keys && heads % key_heads == 0,
                    "qkv: ", values, " values a position; must be ", heads, " heads of v of ", dv,
                    ", and q and k of ", dk, ", of a divisor of ", heads, " heads");
  for (const auto& [name, t] : {std::pair{"a", a.a}, std::pair{"b", a.b}}) {
    check_addend(name, t, {batch, qkv.sym_size(1), heads}, qkv);
  }
  check_addend("a_log", a.a_log, {heads}, qkv);
  check_addend("dt_bias", a.dt_bias, {heads}, qkv);
  check_f32("eps", a.eps);
  TORCH_CHECK_VALUE(a.eps >= 0, "eps: ", a.eps, "; must be 0 or more");
  return {batch, qkv.sym_size(1), key_heads, heads, dk, dv};
}

SsmShape check(const args::ssm_scan& a) {
  const Tensor &xbc = a.xbc, &state = a.state;
  check_state("xbc", xbc, state, "[B, heads, P, N]");
  const Size batch = xbc.sym_size(0), positions = xbc.sym_size(1), values = xbc.sym_size(2);
  const Size heads = state.sym_size(1), p = state.sym_size(2), n = state.sym_size(3);
  constexpr int64_t kMost = SsmScanGeometry::kMostValues;
  TORCH_CHECK_VALUE(
      state.sym_size(0) == batch && heads >= 1 && p >= 1 && n >= 4 && n <= kMost && n % 4 == 0,
      "state: shape ", state.sym_sizes(), "; must be [", batch,
      ", heads, P, N], N a multiple of 4 up to ", kMost);
  const Size rest = values - heads * p, groups = rest / (n * 2);
  TORCH_CHECK_VALUE(rest > 0 && groups * n * 2 == rest && heads % groups == 0, "xbc: ", values,
                    " values a position; must be ", heads, " heads of x of ", p,
                    ", and b and c of ", n, ", of a divisor of ", heads, " groups");
  check_addend("dt", a.dt, {batch, positions, heads}, xbc);
  for (const auto& [name, t] :
       {std::pair{"a_log", a.a_log}, std::pair{"dt_bias", a.dt_bias}, std::pair{"d", a.d}}) {
    check_addend(name, t, {heads}, xbc);
  }
  check_addend("gate", a.gate, {batch, positions, heads * p}, xbc);
  check_f32("dt_min", a.dt_min);
  if (a.dt_max.has_value()) check_f32("dt_max", *a.dt_max);
  TORCH_CHECK_VALUE(a.dt_min >= 0, "dt_min: ", a.dt_min, "; must be 0 or more");
  TORCH_CHECK_VALUE(!a.dt_max.has_value() || *a.dt_max >= a.dt_min,
                    "dt_max: ", a.dt_max.value_or(0), "; must be dt_min or more");
  return {batch, positions, groups, heads, p};
}

}  // namespace metalmm
