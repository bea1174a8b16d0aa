#include "gpu_ops.h"

#include <algorithm>
#include <stdexcept>

#include "checks.h"

namespace metalmm::gpu {
namespace {

// x [..., K] as [M, K] whose rows are dense, in `dtype`.
at::Tensor as_rows(const at::Tensor& x, at::ScalarType dtype) {
  const int64_t k = x.size(-1);
  const int64_t m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const at::Tensor rows = x.to(dtype).reshape({m, k});
  return rows.stride(1) == 1 || k <= 1 ? rows : rows.contiguous();
}

int64_t row_stride(const at::Tensor& rows) {
  return rows.size(0) > 1 ? rows.stride(0) : rows.size(1);
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

// The largest power of two, up to 16, that divides where t begins in memory.
int64_t alignment_of(const at::Tensor& t) {
  const auto at = reinterpret_cast<uintptr_t>(t.storage().data()) +
                  static_cast<uintptr_t>(t.storage_offset() * t.element_size());
  return static_cast<int64_t>((at | 16) & -(at | 16));
}

DType dtype_of(at::ScalarType t) {
  return t == at::kFloat ? DType::kF32 : t == at::kHalf ? DType::kF16 : DType::kBF16;
}

std::optional<StrategyId> check_strategy(OptionalName name) {
  if (!name.has_value()) return std::nullopt;
  try {
    return strategy_by_name(*name);
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

// The operands of a problem; a tensor that is not defined is absent.
struct Operands {
  at::Tensor x, weight, y, bias, c, weight2, x2, ids;
};

void run(const Engine& e, Problem p, const Operands& o, std::optional<StrategyId> strategy) {
  const at::Tensor* slots[] = {&o.x, &o.weight, &o.y, &o.bias, &o.c, &o.weight2, &o.x2, &o.ids};
  Buffers buffers{};
  for (int i = 0; i < 8; ++i) {
    if (slots[i]->defined()) buffers[i] = buffer_of(*slots[i]);
  }
  if (o.x.defined()) p.x_alignment = alignment_of(o.x);
  if (o.x2.defined()) p.x_alignment = std::min(p.x_alignment, alignment_of(o.x2));
  if (o.weight.defined()) p.w_alignment = alignment_of(o.weight);
  if (o.weight2.defined()) p.w_alignment = std::min(p.w_alignment, alignment_of(o.weight2));
  Plan made;
  try {
    made = plan(p, e.gpu, strategy);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  at::Tensor workspace;
  if (made.workspace_bytes) {
    const auto bytes = static_cast<int64_t>(made.workspace_bytes);
    workspace = at::empty({bytes / 4}, o.y.options().dtype(at::kFloat));
    buffers[kSlotPartial] = buffer_of(workspace);
  }
  e.launch(made, buffers);
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

at::Tensor like_input(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = y.size(1);
  return y.view(shape).to(x.scalar_type());
}

Problem problem(Op op, const Format& f, const at::Tensor& rows, const at::Tensor& w) {
  Problem p;
  p.op = op;
  p.m = rows.size(0);
  p.n = w.size(0);
  p.k = rows.size(1);
  p.format = &f;
  p.dtype = dtype_of(rows.scalar_type());
  p.x_stride = row_stride(rows);
  p.w_stride = row_stride(w);
  return p;
}

at::Tensor decode(const Engine& e, const at::Tensor& w, const Format& f, int64_t k,
                  at::ScalarType type) {
  Operands o;
  o.weight = w;
  o.y = at::empty({w.size(0), k}, w.options().dtype(type));
  Problem p;
  p.op = Op::kDequantize;
  p.n = w.size(0);
  p.k = k;
  p.format = &f;
  p.dtype = dtype_of(type);
  p.w_stride = row_stride(w);
  run(e, p, o, std::nullopt);
  return o.y;
}

}  // namespace

at::Tensor linear(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                  const OptionalTensor& bias, std::string_view format, OptionalName strategy) {
  const Format& f = check_format(format);
  const at::Tensor w = check_weight("weight", weight, f, check_activations("x", x), x);
  check_addend("bias", bias, {w.size(0)}, x);
  const at::ScalarType dtype = common_dtype(x, bias);
  Operands o;
  o.x = as_rows(x, dtype);
  o.weight = w;
  o.bias = addend(bias, dtype);
  o.y = at::empty({o.x.size(0), w.size(0)}, o.x.options());
  Problem p = problem(Op::kLinear, f, o.x, w);
  p.has_bias = bias.has_value();
  run(e, p, o, check_strategy(strategy));
  return like_input(o.y, x);
}

at::Tensor linear_input_grad(const Engine& e, const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features) {
  const Format& f = check_format(format);
  const int64_t n = check_activations("grad", grad);
  const at::Tensor w = check_weight("weight", weight, f, in_features, grad);
  TORCH_CHECK_VALUE(n == w.size(0), "grad: last size ", n, "; weight has ", w.size(0), " rows");
  const at::Tensor dense = decode(e, w, f, in_features, at::kFloat);
  return like_input(as_rows(grad, at::kFloat).mm(dense), grad);
}

at::Tensor swiglu(const Engine& e, const at::Tensor& x, const at::Tensor& gate_weight,
                  const at::Tensor& up_weight, std::string_view format_gate,
                  std::string_view format_up) {
  const Format &fg = check_format(format_gate), &fu = check_format(format_up);
  const int64_t k = check_activations("x", x);
  Operands o;
  o.weight = check_weight("gate_weight", gate_weight, fg, k, x);
  o.weight2 = check_weight("up_weight", up_weight, fu, k, x);
  TORCH_CHECK_VALUE(o.weight.size(0) == o.weight2.size(0), "up_weight: has ", o.weight2.size(0),
                    " rows, gate_weight ", o.weight.size(0));
  o.x = as_rows(x, x.scalar_type());
  if (&fg != &fu || !is_fused(Op::kSwigluUp, o.x.size(0))) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor gate = linear(e, wide, gate_weight, std::nullopt, format_gate, std::nullopt);
    const at::Tensor up = linear(e, wide, up_weight, std::nullopt, format_up, std::nullopt);
    return at::silu(gate).mul_(up).to(x.scalar_type());
  }
  o.y = at::empty({o.x.size(0), o.weight.size(0)}, o.x.options());
  Problem p = problem(Op::kSwigluUp, fg, o.x, o.weight);
  p.w2_stride = row_stride(o.weight2);
  run(e, p, o, std::nullopt);
  return like_input(o.y, x);
}

at::Tensor swiglu_linear(const Engine& e, const at::Tensor& gate, const at::Tensor& up,
                         const at::Tensor& weight, const OptionalTensor& bias,
                         std::string_view format) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("gate", gate);
  check_addend("up", up, gate.sizes(), gate);
  const at::Tensor w = check_weight("weight", weight, f, k, gate);
  check_addend("bias", bias, {w.size(0)}, gate);
  const bool same = up.scalar_type() == gate.scalar_type();
  const at::ScalarType dtype = same ? common_dtype(gate, bias) : at::kFloat;
  Operands o;
  o.x = as_rows(gate, dtype);
  o.x2 = as_rows(up, dtype);
  if (!is_fused(Op::kSwigluDown, o.x.size(0))) {
    const at::Tensor hidden = at::silu(gate.to(at::kFloat)).mul_(up.to(at::kFloat));
    return linear(e, hidden, weight, bias, format, std::nullopt).to(gate.scalar_type());
  }
  if (row_stride(o.x) != row_stride(o.x2)) {  // one stride for both
    o.x = o.x.contiguous();
    o.x2 = o.x2.contiguous();
  }
  o.weight = w;
  o.bias = addend(bias, dtype);
  o.y = at::empty({o.x.size(0), w.size(0)}, o.x.options());
  Problem p = problem(Op::kSwigluDown, f, o.x, w);
  p.has_bias = bias.has_value();
  run(e, p, o, std::nullopt);
  return like_input(o.y, gate);
}

at::Tensor scaled_matmul(const Engine& e, const at::Tensor& x, const at::Tensor& weight,
                         std::string_view format, const OptionalTensor& c, double alpha,
                         double beta, OptionalName strategy, int64_t dim) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("x", x);
  TORCH_CHECK_VALUE(x.dim() == dim, "x: shape ", x.sizes(), "; must have ", dim, " dimensions");
  const at::Tensor w = check_weight("weight", weight, f, k, x);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  check_addend("c", c, shape, x);
  TORCH_CHECK_VALUE(beta == 0 || c.has_value(), "c: missing, but beta = ", beta);
  const at::ScalarType dtype = common_dtype(x, beta == 0 ? std::nullopt : c);
  Operands o;
  o.x = as_rows(x, dtype);
  o.weight = w;
  if (beta != 0) o.c = addend(c, dtype);
  o.y = at::empty({o.x.size(0), w.size(0)}, o.x.options());
  Problem p = problem(Op::kLinear, f, o.x, w);
  p.has_c = beta != 0;
  p.alpha = static_cast<float>(alpha);
  p.beta = static_cast<float>(beta);
  run(e, p, o, check_strategy(strategy));
  return like_input(o.y, x);
}

at::Tensor dequantize(const Engine& e, const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const Format& f = check_format(format);
  const at::ScalarType type = check_dtype(dtype);
  const int64_t k = resolve_in_features(weight, f, in_features);
  return decode(e, check_weight("weight", weight, f, k, weight), f, k, type);
}

at::Tensor embedding(const Engine& e, const at::Tensor& ids, const at::Tensor& weight,
                     std::string_view format, std::optional<int64_t> in_features,
                     std::optional<at::ScalarType> dtype) {
  const Format& f = check_format(format);
  const at::ScalarType type = check_dtype(dtype);
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                    ids.scalar_type(), "; allowed: int64, int32");
  const int64_t k = resolve_in_features(weight, f, in_features);
  Operands o;
  o.weight = check_weight("weight", weight, f, k, ids);
  o.ids = ids.to(at::kLong).contiguous();
  const int64_t rows = o.weight.size(0);
  if (o.ids.is_cpu() && o.ids.numel()) {  // elsewhere this would wait for the device
    const int64_t *first = o.ids.const_data_ptr<int64_t>(), *last = first + o.ids.numel();
    const auto bad = std::find_if(first, last, [=](int64_t i) { return i < 0 || i >= rows; });
    TORCH_CHECK_INDEX(bad == last, "ids: ", bad == last ? 0 : *bad,
                      " is out of range; the table has ", rows, " rows");
  }
  o.y = at::empty({o.ids.numel(), k}, o.weight.options().dtype(type));
  Problem p;
  p.op = Op::kEmbedding;
  p.m = o.ids.numel();
  p.n = rows;
  p.k = k;
  p.format = &f;
  p.dtype = dtype_of(type);
  p.w_stride = row_stride(o.weight);
  run(e, p, o, std::nullopt);
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(k);
  return o.y.view(shape);
}

}  // namespace metalmm::gpu
