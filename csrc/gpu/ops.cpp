#include "ops.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/dtypes.h"
#include "ops/op_calls.h"
#include "ops/strategies.h"
#include "ops/tensors.h"

namespace metalmm::gpu {
namespace {

// torch's stride means nothing where a tensor has no elements or a single row.
int64_t row_stride(const at::Tensor& rows) {
  return rows.size(0) > 1 && rows.numel() ? rows.stride(0) : rows.size(1);
}

// The memory from the first element of t to its last.
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

// The largest power of two, up to 16, that divides where t begins in memory. A Metal buffer begins
// at a multiple of 256, and the data pointer of its storage is an object, not an address.
int64_t alignment_of(const at::Tensor& t) {
  const auto base = t.is_mps() ? uintptr_t{0} : reinterpret_cast<uintptr_t>(t.storage().data());
  const auto at = base + static_cast<uintptr_t>(t.storage_offset() * t.element_size());
  return static_cast<int64_t>((at | 16) & -(at | 16));
}

// The rows of W, copied where a view of theirs begins between the words that the shaders load.
at::Tensor aligned_rows(const PackedWeight& w) {
  const bool is_aligned = alignment_of(w.rows) % w.format.alignment == 0 &&
                          row_stride(w.rows) % w.format.alignment == 0;
  return is_aligned ? w.rows : w.rows.clone(at::MemoryFormat::Contiguous);
}

// The dtype is that of a checked tensor.
DType dtype_of(at::ScalarType t) { return find_dtype(t).value(); }

// The operands of a problem by slot; a tensor that is not defined is absent.
class Operands {
 public:
  at::Tensor& operator[](Slot slot) { return tensors_.at(slot); }
  const at::Tensor& operator[](Slot slot) const { return tensors_.at(slot); }

 private:
  std::array<at::Tensor, kSlotPartial> tensors_;  // what is behind is the plan's own
};

void run(const Engine& e, Problem p, const Operands& o,
         std::optional<StrategyId> strategy = std::nullopt) {
  Buffers buffers{};
  for (uint32_t slot = 0; slot < kSlotPartial; ++slot) {
    const at::Tensor& operand = o[static_cast<Slot>(slot)];
    if (operand.defined()) buffers[slot] = buffer_of(operand);
  }
  for (Slot slot : {kSlotX, kSlotX2}) {
    if (o[slot].defined()) p.x_alignment = std::min(p.x_alignment, alignment_of(o[slot]));
  }
  for (Slot slot : {kSlotWeight, kSlotWeight2}) {
    if (!o[slot].defined()) continue;
    p.w_alignment = std::min(p.w_alignment, alignment_of(o[slot]));
    (slot == kSlotWeight ? p.w_stride : p.w2_stride) = row_stride(o[slot]);
  }
  p.has_bias = o[kSlotBias].defined();
  p.has_c = o[kSlotC].defined();
  const c10::Device device = o[kSlotY].device();
  const Plan made = or_value_error([&] { return plan(p, e.gpu(device), strategy); });
  if (made.passes.empty()) return;
  at::Tensor workspace;
  if (made.workspace_bytes) {
    const auto bytes = static_cast<int64_t>(made.workspace_bytes);
    workspace = at::empty({bytes / 4}, o[kSlotY].options().dtype(at::kFloat));
    buffers[kSlotPartial] = buffer_of(workspace);
  }
  e.launch(made, buffers, device);
}

// bias or c in the dtype of the kernel, or none.
at::Tensor addend(const OptionalTensor& t, at::ScalarType dtype) {
  return t.has_value() ? t->to(dtype).contiguous() : at::Tensor();
}

// The kernels read bias and c in the dtype of x. Another dtype would be rounded once too often:
// then all of them are f32, and the result is rounded.
at::ScalarType common_dtype(const at::Tensor& x, const OptionalTensor& addend) {
  const bool same = !addend.has_value() || addend->scalar_type() == x.scalar_type();
  return same ? x.scalar_type() : at::kFloat;
}

Problem problem(Op op, const at::Tensor& rows, const PackedWeight& w) {
  Problem p;
  p.op = op;
  p.m = rows.size(0);
  p.n = w.rows.size(0);
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(rows.scalar_type());
  p.x_stride = row_stride(rows);
  return p;
}

// x W^T [M, N] in f32; x is multiplied in its own dtype.
at::Tensor linear_f32(const Engine& e, const at::Tensor& rows, const PackedWeight& w) {
  Operands o;
  o[kSlotX] = rows;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotY] = at::empty({rows.size(0), w.rows.size(0)}, rows.options().dtype(at::kFloat));
  Problem p = problem(Op::kLinear, rows, w);
  p.y_f32 = true;
  run(e, p, o);
  return o[kSlotY];
}

// silu(gate) * up of f32 gate and up, rounded once.
at::Tensor silu_mul(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                    at::ScalarType dtype) {
  Operands o;
  o[kSlotX] = gate;
  o[kSlotX2] = up;
  o[kSlotY] = at::empty(gate.sizes(), gate.options().dtype(dtype));
  Problem p;
  p.op = Op::kSiluMul;
  p.n = gate.numel();
  p.dtype = dtype_of(dtype);
  run(e, p, o);
  return o[kSlotY];
}

// Rows [first, last) of W.
at::Tensor decode(const Engine& e, const PackedWeight& w, int64_t first, int64_t last,
                  at::ScalarType type) {
  Operands o;
  o[kSlotWeight] = aligned_rows({w.format, w.rows.narrow(0, first, last - first), w.k});
  o[kSlotY] = at::empty({last - first, w.k}, w.rows.options().dtype(type));
  Problem p;
  p.op = Op::kDequantize;
  p.n = last - first;
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(type);
  run(e, p, o);
  return o[kSlotY];
}

at::Tensor scaled_matmul(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         std::string_view format, const OptionalTensor& c, double alpha,
                         double beta, OptionalName strategy, int64_t dim) {
  const PackedWeight w = packed(weight, check_scaled(x, weight, format, c, beta, dim));
  const at::ScalarType dtype = common_dtype(x, beta == 0 ? std::nullopt : c);
  Operands o;
  o[kSlotX] = as_rows(x, dtype);
  o[kSlotWeight] = aligned_rows(w);
  if (beta != 0) o[kSlotC] = addend(c, dtype);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  Problem p = problem(Op::kLinear, o[kSlotX], w);
  p.alpha = static_cast<float>(alpha);
  p.beta = static_cast<float>(beta);
  run(e, p, o, find_strategy(strategy, x));
  return like_input(o[kSlotY], x);
}

}  // namespace

at::Tensor linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                  const OptionalTensor& bias, std::string_view format, OptionalName strategy) {
  const PackedWeight w = packed(weight, check_linear(x, weight, bias, format));
  const at::ScalarType dtype = common_dtype(x, bias);
  Operands o;
  o[kSlotX] = as_rows(x, dtype);
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotBias] = addend(bias, dtype);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  run(e, problem(Op::kLinear, o[kSlotX], w), o, find_strategy(strategy, x));
  return like_input(o[kSlotY], x);
}

at::Tensor linear_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features) {
  const PackedWeight w = packed(weight, check_input_grad(grad, weight, format, in_features));
  const at::Tensor out = times_decoded(
      as_rows(grad, at::kFloat), w.k,
      [&](int64_t first, int64_t last) { return decode(e, w, first, last, at::kFloat); });
  return like_input(out, grad);
}

at::Tensor swiglu(const Engine& e, const at::Tensor& x, const at::Tensor& gate_weight,
                  const at::Tensor& up_weight, std::string_view format_gate,
                  std::string_view format_up) {
  const GateUpShape shape = check_swiglu(x, gate_weight, up_weight, format_gate, format_up);
  const PackedWeight gate_w = packed(gate_weight, shape.gate), up_w = packed(up_weight, shape.up);
  Operands o;
  o[kSlotX] = as_rows(x, x.scalar_type());
  if (&gate_w.format != &up_w.format || !is_fused(Op::kSwigluUp, o[kSlotX].size(0))) {
    const at::Tensor gate = linear_f32(e, o[kSlotX], gate_w), up = linear_f32(e, o[kSlotX], up_w);
    return like_input(silu_mul(e, gate, up, x.scalar_type()), x);
  }
  o[kSlotWeight] = aligned_rows(gate_w);
  o[kSlotWeight2] = aligned_rows(up_w);
  o[kSlotY] = at::empty({o[kSlotX].size(0), o[kSlotWeight].size(0)}, o[kSlotX].options());
  run(e, problem(Op::kSwigluUp, o[kSlotX], gate_w), o);
  return like_input(o[kSlotY], x);
}

at::Tensor swiglu_linear(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& weight, const OptionalTensor& bias,
                         std::string_view format) {
  const PackedWeight w = packed(weight, check_swiglu_linear(gate, up, weight, bias, format));
  const bool same = up.scalar_type() == gate.scalar_type();
  const at::ScalarType dtype = same ? common_dtype(gate, bias) : at::kFloat;
  Operands o;
  o[kSlotX] = as_rows(gate, dtype);
  o[kSlotX2] = as_rows(up, dtype);
  if (!is_fused(Op::kSwigluDown, o[kSlotX].size(0))) {
    // The product stays f32: f16 cannot hold 3e4 * 3e4. So x of the linear is f32, and so are its
    // tiles; swiglu, then linear, is the faster way for many rows.
    const auto f32 = [](const at::Tensor& t) { return t.to(at::kFloat).contiguous(); };
    const at::Tensor hidden =
        silu_mul(e, f32(o[kSlotX]), f32(o[kSlotX2]), at::kFloat).view(gate.sizes());
    return linear(e, hidden, weight, bias, format, std::nullopt).to(gate.scalar_type());
  }
  if (row_stride(o[kSlotX]) != row_stride(o[kSlotX2])) {  // one stride for both
    o[kSlotX] = o[kSlotX].contiguous();
    o[kSlotX2] = o[kSlotX2].contiguous();
  }
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotBias] = addend(bias, dtype);
  o[kSlotY] = at::empty({o[kSlotX].size(0), w.rows.size(0)}, o[kSlotX].options());
  run(e, problem(Op::kSwigluDown, o[kSlotX], w), o);
  return like_input(o[kSlotY], gate);
}

at::Tensor gemv(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy) {
  return scaled_matmul(e, x, weight, format, c, alpha, beta, strategy, 1);
}

at::Tensor gemm(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                std::string_view format, const OptionalTensor& c, double alpha, double beta,
                OptionalName strategy) {
  return scaled_matmul(e, x, weight, format, c, alpha, beta, strategy, 2);
}

at::Tensor dequantize(const Engine& e, const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_dequantize(weight, format, in_features));
  return decode(e, w, 0, w.rows.size(0), type);
}

at::Tensor embedding(const Engine& e, const at::Tensor& ids, const at::Tensor& weight,
                     std::string_view format, std::optional<int64_t> in_features,
                     std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_embedding(ids, weight, format, in_features));
  check_ids(ids, w.rows.size(0));
  Operands o;
  o[kSlotWeight] = aligned_rows(w);
  o[kSlotIds] = ids.to(at::kLong).contiguous();
  o[kSlotY] = at::empty({o[kSlotIds].numel(), w.k}, w.rows.options().dtype(type));
  Problem p;
  p.op = Op::kEmbedding;
  p.m = o[kSlotIds].numel();
  p.n = w.rows.size(0);
  p.k = w.k;
  p.format = &w.format;
  p.dtype = dtype_of(type);
  run(e, p, o);
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(w.k);
  return o[kSlotY].view(shape);
}

at::Tensor quantize(const at::Tensor& w, std::string_view format) {
  check_quantize(w, format);
  return call_quantize(w.detach().to(at::kCPU), format).to(w.device());
}

at::Tensor probe(const Engine& e, const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  Problem p;
  p.op = check_probe(x, x2, op);
  p.dtype = dtype_of(x.scalar_type());
  const bool is_dot = p.op == Op::kDot;
  (is_dot ? p.k : p.n) = x.numel();
  Operands o;
  o[kSlotX] = x.contiguous();
  o[kSlotX2] = x2.contiguous();
  o[kSlotY] = is_dot ? at::empty({}, x.options()) : at::empty(x.sizes(), x.options());
  run(e, p, o);
  return o[kSlotY];
}

}  // namespace metalmm::gpu
