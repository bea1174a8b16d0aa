#include "recurrent.h"

#include <utility>

#include "attention/memory.h"
#include "checks.h"
#include "metal/geometry.h"

namespace metalmm {

using Size = c10::SymInt;

DeltaShape check(const args::gated_delta& a) {
  const Tensor &qkv = a.qkv, &state = a.state;
  check_activation_dtype("qkv", qkv);
  TORCH_CHECK_VALUE(qkv.dim() == 3, "qkv: shape ", qkv.sym_sizes(), "; must be [B, S, values]");
  check_device("state", state, qkv);
  TORCH_CHECK_VALUE(state.scalar_type() == at::kFloat && state.dim() == 4,
                    "state: ", state.scalar_type(), " ", state.sym_sizes(),
                    "; must be float32 [B, heads, dk, dv]");
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

void check_memory(const args::gated_delta& a) {
  check_written(
      "state", a.state,
      {{"qkv", a.qkv}, {"a", a.a}, {"b", a.b}, {"a_log", a.a_log}, {"dt_bias", a.dt_bias}});
}

}  // namespace metalmm
