// The recurrent ops: a state that a dispatch reads and writes.
#include "ops/recurrent.h"

#include <algorithm>

#include "operands.h"
#include "ops/attention/memory.h"

namespace metalmm::gpu {
namespace {

// Launches on a state that the kernel reads and writes: where it lies, or, strided or not
// `aligned`, on a copy.
void launch_on(const Engine& e, const Problem& p, Operands& o, const at::Tensor& state,
               int64_t aligned) {
  const bool in_place = state.is_contiguous() && alignment_of(state) >= aligned;
  o[kSlotY2] = in_place ? state : state.clone(at::MemoryFormat::Contiguous);
  launch(e, p, o);
  if (!in_place) at::Tensor(state).copy_(o[kSlotY2]);
}

constexpr int64_t kFourValues = 16;  // bytes that a kernel reads at a time

}  // namespace

at::Tensor causal_conv(const Engine& e, const args::causal_conv& a) {
  check(a);
  check_written(a);
  const at::ScalarType dtype = a.x.scalar_type();
  const bool same =
      a.weight.scalar_type() == dtype && (!a.bias.has_value() || a.bias->scalar_type() == dtype);
  Operands o;
  o[kSlotX] = as_rows(a.x, dtype);
  o[kSlotNorm] = addend(a.weight, same ? dtype : at::kFloat);
  o[kSlotNorm2] = addend(a.bias, same ? dtype : at::kFloat);
  o[kSlotY] = at::empty(a.x.sizes(), o[kSlotX].options());
  Problem p = problem(Op::kCausalConv, o[kSlotX]);
  p.n = a.x.size(2);
  p.k = a.weight.size(1);
  p.conv = {std::max<int64_t>(a.x.size(1), 1), a.state.size(2), a.bias.has_value(),
            a.activation.has_value(), !same};
  launch_on(e, p, o, a.state, 1);
  return o[kSlotY];
}

at::Tensor gated_delta(const Engine& e, const args::gated_delta& a) {
  const DeltaShape shape = check(a);
  check_written(a);
  const at::ScalarType dtype = common_dtype(a.qkv, {a.a, a.b});
  const bool same = a.a_log.scalar_type() == dtype && a.dt_bias.scalar_type() == dtype;
  Operands o;
  o[kSlotX] = as_rows(a.qkv, dtype);
  o[kSlotX2] = as_rows(a.a, dtype);
  o[kSlotC] = as_rows(a.b, dtype);
  o[kSlotNorm] = addend(a.a_log, same ? dtype : at::kFloat);
  o[kSlotNorm2] = addend(a.dt_bias, same ? dtype : at::kFloat);
  o[kSlotY] = at::empty({a.qkv.size(0), a.qkv.size(1), a.state.size(1), a.state.size(3)},
                        o[kSlotX].options());
  Problem p = problem(Op::kGatedDelta, o[kSlotX]);
  p.n = a.state.size(3);
  p.k = a.state.size(2);
  p.x2_stride = row_stride(o[kSlotX2]);
  p.y_stride = row_stride(o[kSlotC]);
  p.eps = static_cast<float>(a.eps);
  p.delta = {a.state.size(1), shape.key_heads.expect_int(), std::max<int64_t>(a.qkv.size(1), 1),
             !same};
  launch_on(e, p, o, a.state, kFourValues);
  return o[kSlotY].to(a.qkv.scalar_type());
}

at::Tensor ssm_scan(const Engine& e, const args::ssm_scan& a) {
  const SsmShape shape = check(a);
  check_written(a);
  const bool has_gate = a.gate.has_value();
  const at::ScalarType dtype = common_dtype(a.xbc, {a.dt, has_gate ? *a.gate : a.dt});
  const bool same = a.a_log.scalar_type() == dtype && a.dt_bias.scalar_type() == dtype &&
                    a.d.scalar_type() == dtype;
  const at::ScalarType of_heads = same ? dtype : at::kFloat;
  Operands o;
  o[kSlotX] = as_rows(a.xbc, dtype);
  o[kSlotX2] = as_rows(a.dt, dtype);
  if (has_gate) o[kSlotC] = as_rows(*a.gate, dtype);
  o[kSlotNorm] = addend(a.a_log, of_heads);
  o[kSlotNorm2] = addend(a.dt_bias, of_heads);
  o[kSlotBias] = addend(a.d, of_heads);
  o[kSlotY] = at::empty({a.xbc.size(0), a.xbc.size(1), a.state.size(1) * a.state.size(2)},
                        o[kSlotX].options());
  Problem p = problem(Op::kSsmScan, o[kSlotX]);
  p.n = a.state.size(2);
  p.k = a.state.size(3);
  p.x2_stride = row_stride(o[kSlotX2]);
  if (has_gate) p.y_stride = row_stride(o[kSlotC]);
  p.has_gate = has_gate;
  p.ssm.heads = a.state.size(1);
  p.ssm.groups = shape.groups.expect_int();
  p.ssm.positions = std::max<int64_t>(a.xbc.size(1), 1);
  p.ssm.float_heads = !same;
  p.ssm.dt_min = static_cast<float>(a.dt_min);
  if (a.dt_max.has_value()) p.ssm.dt_max = static_cast<float>(*a.dt_max);
  launch_on(e, p, o, a.state, kFourValues);
  return o[kSlotY].to(a.xbc.scalar_type());
}

}  // namespace metalmm::gpu
