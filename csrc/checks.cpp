#include "checks.h"

#include <algorithm>
#include <string>
#include <vector>

namespace metalmm {
namespace {

bool is_activation_dtype(at::ScalarType t) {
  return t == at::kFloat || t == at::kHalf || t == at::kBFloat16;
}

std::optional<at::ScalarType> dense_dtype(const Format& f) {
  if (f.codec == Codec::F32) return at::kFloat;
  if (f.codec == Codec::F16) return at::kHalf;
  if (f.codec == Codec::BF16) return at::kBFloat16;
  return std::nullopt;
}

const Format& check_format(std::string_view name) {
  return or_value_error([&]() -> const Format& { return format_by_name(name); });
}

void check_k(const char* name, const Format& f, int64_t k) {
  TORCH_CHECK_VALUE(k >= 0 && k % f.block_values == 0, name, ": K = ", k,
                    " is not a multiple of the block of ", f.name, ", ", f.block_values, " values");
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.device() == x.device(), name, ": is on ", t.device(), ", the activations on ",
                    x.device(), "; all tensors of a call must be on one device");
}

// x, f32 / f16 / bf16 with at least one dimension. Returns its last size, K.
int64_t check_activations(const char* name, const at::Tensor& x) {
  TORCH_CHECK_VALUE(is_activation_dtype(x.scalar_type()), name, ": dtype ", x.scalar_type(),
                    "; allowed: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(x.dim() >= 1, name, ": must have at least one dimension, [..., K]");
  return x.size(-1);
}

// A weight for rows of k values on the device of x.
PackedWeight check_weight(const char* name, const at::Tensor& weight, std::string_view format_name,
                          int64_t k, const at::Tensor& x) {
  const Format& format = check_format(format_name);
  check_k(name, format, k);
  check_device(name, weight, x);
  TORCH_CHECK_VALUE(weight.dim() == 2, name, ": shape ", weight.sizes(),
                    "; must be [N, row_bytes]");
  if (weight.scalar_type() != at::kByte && dense_dtype(format) == weight.scalar_type()) {
    TORCH_CHECK_VALUE(weight.size(1) == k, name, ": shape ", weight.sizes(), ", but K = ", k);
    return {format, weight.contiguous().view(at::kByte), k};
  }
  TORCH_CHECK_VALUE(weight.scalar_type() == at::kByte, name, ": dtype ", weight.scalar_type(),
                    "; allowed: uint8 rows of ", format.name);
  TORCH_CHECK_VALUE(weight.size(1) == format.row_bytes(k), name, ": shape ", weight.sizes(),
                    "; a row of ", k, " values in ", format.name, " has ", format.row_bytes(k),
                    " bytes");
  const bool dense = weight.stride(1) == 1 || weight.numel() == 0;
  return {format, dense ? weight : weight.contiguous(), k};
}

// A floating tensor of exactly this shape on the device of x, or nothing.
void check_addend(const char* name, const OptionalTensor& t, at::IntArrayRef shape,
                  const at::Tensor& x) {
  if (!t.has_value()) return;
  check_device(name, *t, x);
  TORCH_CHECK_VALUE(is_activation_dtype(t->scalar_type()), name, ": dtype ", t->scalar_type(),
                    "; allowed: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(t->sizes() == shape, name, ": shape ", t->sizes(), "; must be ", shape);
}

// K of a packed weight whose caller may not have said.
int64_t resolve_in_features(const at::Tensor& weight, std::string_view format_name,
                            std::optional<int64_t> in_features) {
  const Format& format = check_format(format_name);
  if (in_features.has_value()) return *in_features;
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sizes(),
                    "; must be [N, row_bytes]");
  const int64_t row = weight.size(1);
  if (weight.scalar_type() != at::kByte && format.layout == Layout::kDense) return row;
  const int64_t k = row / format.block_bytes * format.block_values;
  TORCH_CHECK_VALUE(format.row_bytes(k) == row, "weight: rows of ", row,
                    " bytes are no whole number of ", format.name, " blocks");
  const int64_t smaller = k - format.block_values;
  TORCH_CHECK_VALUE(smaller < 0 || format.row_bytes(smaller) != row, "in_features: rows of ", row,
                    " bytes hold ", smaller, " or ", k, " values of ", format.name, "; say which");
  return k;
}

void check_ids(const at::Tensor& ids, int64_t rows) {
  if (!ids.numel()) return;
  TORCH_CHECK_INDEX(rows > 0, "ids: ", ids.numel(), " of them; the table has 0 rows");
  if (ids.is_cpu()) {
    const at::Tensor flat = ids.to(at::kLong).contiguous();
    const int64_t *first = flat.const_data_ptr<int64_t>(), *last = first + flat.numel();
    const auto bad = std::find_if(first, last, [=](int64_t i) { return i < 0 || i >= rows; });
    TORCH_CHECK_INDEX(bad == last, "ids: ", bad == last ? 0 : *bad,
                      " is out of range; the table has ", rows, " rows");
  }
}

}  // namespace

PackedWeight check_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                          std::string_view format) {
  PackedWeight w = check_weight("weight", weight, format, check_activations("x", x), x);
  check_addend("bias", bias, {w.rows.size(0)}, x);
  return w;
}

PackedWeight check_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                              std::string_view format, int64_t in_features) {
  const int64_t n = check_activations("grad", grad);
  PackedWeight w = check_weight("weight", weight, format, in_features, grad);
  TORCH_CHECK_VALUE(n == w.rows.size(0), "grad: last size ", n, "; weight has ", w.rows.size(0),
                    " rows");
  return w;
}

GateUp check_swiglu(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                    std::string_view format_gate, std::string_view format_up) {
  const int64_t k = check_activations("x", x);
  GateUp out{check_weight("gate_weight", gate_weight, format_gate, k, x),
             check_weight("up_weight", up_weight, format_up, k, x)};
  TORCH_CHECK_VALUE(out.gate.rows.size(0) == out.up.rows.size(0), "up_weight: has ",
                    out.up.rows.size(0), " rows, gate_weight ", out.gate.rows.size(0));
  return out;
}

PackedWeight check_swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                 const at::Tensor& weight, const OptionalTensor& bias,
                                 std::string_view format) {
  const int64_t k = check_activations("gate", gate);
  check_addend("up", up, gate.sizes(), gate);
  PackedWeight w = check_weight("weight", weight, format, k, gate);
  check_addend("bias", bias, {w.rows.size(0)}, gate);
  return w;
}

PackedWeight check_scaled(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                          const OptionalTensor& c, double beta, int64_t dim) {
  const int64_t k = check_activations("x", x);
  TORCH_CHECK_VALUE(x.dim() == dim, "x: shape ", x.sizes(), "; must have ", dim, " dimensions");
  PackedWeight w = check_weight("weight", weight, format, k, x);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.rows.size(0);
  check_addend("c", c, shape, x);
  TORCH_CHECK_VALUE(beta == 0 || c.has_value(), "c: missing, but beta = ", beta);
  return w;
}

PackedWeight check_dequantize(const at::Tensor& weight, std::string_view format,
                              std::optional<int64_t> in_features) {
  const int64_t k = resolve_in_features(weight, format, in_features);
  return check_weight("weight", weight, format, k, weight);
}

PackedWeight check_embedding(const at::Tensor& ids, const at::Tensor& weight,
                             std::string_view format, std::optional<int64_t> in_features) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                    ids.scalar_type(), "; allowed: int64, int32");
  const int64_t k = resolve_in_features(weight, format, in_features);
  PackedWeight w = check_weight("weight", weight, format, k, ids);
  check_ids(ids, w.rows.size(0));
  return w;
}

const Format& check_quantize(const at::Tensor& w, std::string_view format) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("w", w);
  TORCH_CHECK_VALUE(w.dim() == 2, "w: shape ", w.sizes(), "; must be [N, K]");
  check_k("w", f, k);
  return f;
}

Op check_probe(const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  TORCH_CHECK_VALUE(is_activation_dtype(x.scalar_type()), "x: dtype ", x.scalar_type(),
                    "; allowed: float32, float16, bfloat16");
  check_device("x2", x2, x);
  TORCH_CHECK_VALUE(x2.scalar_type() == x.scalar_type() && x2.sizes() == x.sizes(),
                    "x2: ", x2.scalar_type(), " ", x2.sizes(), "; must be as x, ", x.scalar_type(),
                    " ", x.sizes());
  constexpr Op kProbes[] = {Op::kAdd, Op::kSub, Op::kMul, Op::kDiv, Op::kDot};
  std::string allowed;
  for (const Op probe : kProbes) {
    if (op == to_string(probe)) return probe;
    allowed += (allowed.empty() ? "" : ", ") + std::string(to_string(probe));
  }
  TORCH_CHECK_VALUE(false, "op: '", op, "'; allowed: ", allowed);
}

at::ScalarType check_dtype(std::optional<at::ScalarType> dtype) {
  const at::ScalarType t = dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(is_activation_dtype(t), "dtype: ", t, "; allowed: float32, float16, bfloat16");
  return t;
}

}  // namespace metalmm
