#include "operands.h"

#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "dense.h"
#include "ops/dtypes.h"
#include "ops/exact_rows.h"
#include "plan/passes.h"

namespace metalmm::gpu {

Buffer buffer_of(const at::Tensor& t) {
  Buffer b;
  const int64_t size = t.element_size();
  int64_t last = t.numel() ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && t.numel(); ++d) last += (t.size(d) - 1) * t.stride(d);
  b.base = t.storage().mutable_data();
  b.offset = static_cast<size_t>(t.storage_offset() * size);
  b.bytes = static_cast<size_t>(last * size);
  return b;
}

// A Metal buffer begins at a multiple of 256, and the data pointer of its storage is an object, not
// an address.
int64_t alignment_of(const at::Tensor& t) {
  const auto base = t.is_mps() ? uintptr_t{0} : reinterpret_cast<uintptr_t>(t.storage().data());
  const auto at = base + static_cast<uintptr_t>(t.storage_offset() * t.element_size());
  return static_cast<int64_t>((at | 16) & -(at | 16));
}

int64_t row_stride(const at::Tensor& rows) {
  return rows.size(0) > 1 && rows.numel() ? rows.stride(0) : rows.size(1);
}

at::Tensor aligned_rows(const PackedWeight& w) {
  const bool is_aligned = alignment_of(w.rows) % w.format.alignment == 0 &&
                          row_stride(w.rows) % w.format.alignment == 0;
  return is_aligned ? w.rows : w.rows.clone(at::MemoryFormat::Contiguous);
}

DType dtype_of(at::ScalarType t) { return find_dtype(t).value(); }

namespace {

std::mutex g_mutex;
std::string g_failure;  // message of the last launch that threw

// Tells the engine of weights, not of a cache, which the same slots hold.
void use_weights(const Engine& e, Op op, const Operands& o) {
  if (!e.use_weight || !has_weight(op) || op == Op::kRopeAppend || op == Op::kAttention) return;
  for (const Slot slot : {kSlotWeight, kSlotWeight2}) {
    if (o[slot].defined()) e.use_weight(o[slot].storage());
  }
}

}  // namespace

void launch(const Engine& e, const Problem& p, const Operands& o,
            std::optional<StrategyId> strategy) {
  const c10::Device device = o[kSlotY].device();
  BoundPlan made{or_value_error([&] { return plan(p, e.gpu(device), strategy); })};
  use_weights(e, p.op, o);
  if (made.plan.panel_rows) {
    launch_dense(e, made.plan, o);
    return;
  }
  if (made.plan.passes.empty()) return;
  std::vector<at::Tensor> memory;
  const auto bind = [&](uint32_t slot, const at::Tensor& t) {
    made.buffers[slot] = buffer_of(t);
    memory.push_back(t);
  };
  for (uint32_t slot = 0; slot < kSlotPartial; ++slot) {
    const at::Tensor& operand = o[static_cast<Slot>(slot)];
    if (operand.defined()) bind(slot, operand);
  }
  // Sums follow what is arranged, where a plan has both.
  const size_t first = (made.plan.arranged_bytes + 255) / 256 * 256;
  const auto bytes = static_cast<int64_t>(first + made.plan.workspace_bytes);
  if (bytes) {
    const at::Tensor own = replay::scratch(bytes, o[kSlotY].options());
    const auto part = [&](size_t begin, size_t size) {
      return own.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(size));
    };
    if (made.plan.arranged_bytes) bind(kSlotY2, part(0, made.plan.arranged_bytes));
    if (made.plan.workspace_bytes) bind(kSlotPartial, part(first, made.plan.workspace_bytes));
  }
  try {
    replay::launch(e.launch, std::move(made), device, std::move(memory));
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_failure = error.what();
    throw;
  }
}

std::string take_failure() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return std::exchange(g_failure, {});
}

TORCH_LIBRARY_FRAGMENT(metalmm, m) { m.def("_take_failure() -> str", &take_failure); }

void run(const Engine& e, Problem p, const Operands& o, std::optional<StrategyId> strategy) {
  for (Slot slot : {kSlotX, kSlotX2, kSlotNorm, kSlotC}) {
    if (slot == kSlotC && p.op != Op::kRmsNorm) continue;  // other ops read c value by value
    if (o[slot].defined()) p.x_alignment = std::min(p.x_alignment, alignment_of(o[slot]));
  }
  for (Slot slot : {kSlotWeight, kSlotWeight2}) {
    if (!o[slot].defined()) continue;
    p.w_alignment = std::min(p.w_alignment, alignment_of(o[slot]));
    (slot == kSlotWeight ? p.w_stride : p.w2_stride) = row_stride(o[slot]);
  }
  p.has_bias = o[kSlotBias].defined();
  p.has_c = o[kSlotC].defined();
  p.has_norm_weight = o[kSlotNorm].defined() && p.op != Op::kEmbedding;  // else the scale of rows
  launch(e, p, o, strategy);
}

at::Tensor addend(const OptionalTensor& t, at::ScalarType dtype) {
  return t.has_value() ? t->to(dtype).contiguous() : at::Tensor();
}

at::Tensor residual_rows(const OptionalTensor& residual, at::ScalarType dtype, Problem& p) {
  if (!residual.has_value()) return {};
  p.beta = 1;
  return as_rows(*residual, dtype).contiguous();
}

at::ScalarType common_dtype(const at::Tensor& x, std::initializer_list<OptionalTensor> others) {
  const at::ScalarType dtype = x.scalar_type();
  const auto is_other = [=](const OptionalTensor& t) {
    return t.has_value() && t->scalar_type() != dtype;
  };
  return std::any_of(others.begin(), others.end(), is_other) ? at::kFloat : dtype;
}

Problem problem(Op op, const at::Tensor& rows) {
  Problem p;
  p.op = op;
  p.m = rows.size(0);
  p.k = rows.size(1);
  p.dtype = dtype_of(rows.scalar_type());
  p.x_stride = row_stride(rows);
  return p;
}

Problem problem(Op op, const at::Tensor& rows, const PackedWeight& w) {
  Problem p = problem(op, rows);
  p.n = w.rows.size(0);
  p.k = w.k;
  p.format = &w.format;
  p.exact_rows = are_exact(p.m);
  return p;
}

namespace {

// The numbers and the weight of a norm.
void set_norm(Problem& p, Operands& o, const Norm& norm) {
  o[kSlotNorm] = addend(norm.weight, o[kSlotX].scalar_type());
  p.eps = static_cast<float>(norm.eps);
  p.offset = static_cast<float>(norm.offset);
}

}  // namespace

at::Tensor normalised(const Engine& e, const at::Tensor& rows, const Norm& norm,
                      const OptionalTensor& residual, const OptionalTensor& gate) {
  Problem p = problem(Op::kRmsNorm, rows);
  Operands o;
  o[kSlotX] = rows;
  set_norm(p, o, norm);
  if (norm.weight.has_value() && norm.weight->dim() == 2) p.norm_rows = norm.weight->size(0);
  o[kSlotC] = residual_rows(residual, rows.scalar_type(), p);
  p.has_gate = gate.has_value();
  if (p.has_gate) {
    o[kSlotX2] = as_rows(*gate, rows.scalar_type());
    p.x2_stride = row_stride(o[kSlotX2]);
  }
  o[kSlotY] = at::empty(rows.sizes(), rows.options());
  run(e, p, o);
  return o[kSlotY];
}

void normalise(const Engine& e, Problem& p, Operands& o, const Norm& norm) {
  p.has_norm = norm_is_fused(p, e.gpu(o[kSlotX].device()));
  if (p.has_norm) {
    set_norm(p, o, norm);
  } else {
    o[kSlotX] = normalised(e, o[kSlotX], norm);
    p.x_stride = row_stride(o[kSlotX]);
  }
}

at::Tensor product(const Engine& e, const at::Tensor& rows, const PackedWeight& w,
                   at::ScalarType type, const Norm* norm, std::optional<StrategyId> strategy) {
  Operands o;
  o[kSlotX] = rows;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotY] = at::empty({rows.size(0), w.rows.size(0)}, rows.options().dtype(type));
  Problem p = problem(Op::kLinear, rows, w);
  p.y_f32 = type == at::kFloat;
  p.has_norm = norm != nullptr;
  if (norm) set_norm(p, o, *norm);
  run(e, p, o, strategy);
  return o[kSlotY];
}

bool rounds_product(const Engine& e, const at::Tensor& rows, const PackedWeight& w) {
  if (rows.is_cuda() || rows.scalar_type() == at::kFloat) return false;
  return dense_pays(problem(Op::kLinear, rows, w), e.gpu(rows.device()), Reason(nullptr));
}

}  // namespace metalmm::gpu
