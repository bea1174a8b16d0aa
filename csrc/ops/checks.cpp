#include "checks.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "dtypes.h"
#include "tensors.h"

namespace metalmm {
namespace {

using Size = c10::SymInt;

std::string allowed_dtypes() {
  return join_names(kNumDTypes, [](int i) { return kTorchDTypes[i]; });
}

void check_activation_dtype(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(find_dtype(t.scalar_type()), name, ": dtype ", t.scalar_type(),
                    "; allowed: ", allowed_dtypes());
}

// Whether [N, K] of this type are weights of the format as they are.
bool is_dense(const Format& f, at::ScalarType t) {
  return f.layout == Layout::kDense && find_dtype(t) == dtype_by_name(f.name);
}

const Format& check_format(std::string_view name) {
  return or_value_error([&]() -> const Format& { return format_by_name(name); });
}

void check_k(const char* name, const Format& f, const Size& k) {
  TORCH_CHECK_VALUE(k <= kMaxK, name, ": K = ", k, "; at most ", kMaxK);
  TORCH_CHECK_VALUE(k >= 0 && k % f.block_values == 0, name, ": K = ", k,
                    " is not a multiple of the block of ", f.name, ", ", f.block_values, " values");
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.device() == x.device(), name, ": is on ", t.device(), ", the activations on ",
                    x.device(), "; all tensors of a call must be on one device");
}

// x, f32 / f16 / bf16 with at least one dimension. Returns its last size, K.
Size check_activations(const char* name, const at::Tensor& x) {
  check_activation_dtype(name, x);
  TORCH_CHECK_VALUE(x.dim() >= 1, name, ": must have at least one dimension, [..., K]");
  return x.sym_size(-1);
}

// A weight for rows of k values on the device of x.
WeightShape check_weight(const char* name, const at::Tensor& weight, std::string_view format_name,
                         const Size& k, const at::Tensor& x) {
  const Format& format = check_format(format_name);
  check_k(name, format, k);
  check_device(name, weight, x);
  TORCH_CHECK_VALUE(weight.dim() == 2, name, ": shape ", weight.sym_sizes(),
                    "; must be [N, row_bytes]");
  const bool is_packed = weight.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(is_packed || is_dense(format, weight.scalar_type()), name, ": dtype ",
                    weight.scalar_type(), "; allowed: uint8 rows of ", format.name);
  const Size row = is_packed ? format.row_bytes(k) : k;
  TORCH_CHECK_VALUE(weight.sym_size(1) == row, name, ": shape ", weight.sym_sizes(), "; a row of ",
                    k, " values in ", format.name, " has ", row, is_packed ? " bytes" : " values");
  return {format, weight.sym_size(0), k};
}

// A floating tensor of exactly this shape on the device of x, or nothing.
void check_addend(const char* name, const OptionalTensor& t, c10::SymIntArrayRef shape,
                  const at::Tensor& x) {
  if (!t.has_value()) return;
  check_device(name, *t, x);
  check_activation_dtype(name, *t);
  TORCH_CHECK_VALUE(t->sym_sizes() == shape, name, ": shape ", t->sym_sizes(), "; must be ", shape);
}

// K of a packed weight whose caller may not have said.
Size resolve_in_features(const at::Tensor& weight, std::string_view format_name,
                         const OptionalSize& in_features) {
  const Format& format = check_format(format_name);
  if (in_features.has_value()) return *in_features;
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(),
                    "; must be [N, row_bytes]");
  const Size row = weight.sym_size(1);
  if (weight.scalar_type() != at::kByte && format.layout == Layout::kDense) return row;
  TORCH_CHECK_VALUE(row <= kMaxK, "weight: rows of ", row, " bytes; at most ", kMaxK);
  const Size k = row / format.block_bytes * format.block_values;
  TORCH_CHECK_VALUE(format.row_bytes(k) == row, "weight: rows of ", row,
                    " bytes are no whole number of ", format.name, " blocks");
  const Size smaller = k - format.block_values;
  TORCH_CHECK_VALUE(smaller < 0 || format.row_bytes(smaller) != row, "in_features: rows of ", row,
                    " bytes hold ", smaller, " or ", k, " values of ", format.name, "; say which");
  return k;
}

}  // namespace

PackedWeight packed(const at::Tensor& weight, const WeightShape& checked) {
  const int64_t k = checked.k.expect_int();
  if (weight.scalar_type() != at::kByte) {
    return {checked.format, weight.contiguous().view(at::kByte), k};
  }
  const bool dense = weight.stride(1) == 1 || weight.numel() == 0;
  return {checked.format, dense ? weight : weight.contiguous(), k};
}

WeightShape check_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                         std::string_view format) {
  const WeightShape w = check_weight("weight", weight, format, check_activations("x", x), x);
  check_addend("bias", bias, {w.n}, x);
  return w;
}

WeightShape check_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, const Size& in_features) {
  const Size n = check_activations("grad", grad);
  const WeightShape w = check_weight("weight", weight, format, in_features, grad);
  TORCH_CHECK_VALUE(n == w.n, "grad: last size ", n, "; weight has ", w.n, " rows");
  return w;
}

GateUpShape check_swiglu(const at::Tensor& x, const at::Tensor& gate_weight,
                         const at::Tensor& up_weight, std::string_view format_gate,
                         std::string_view format_up) {
  const Size k = check_activations("x", x);
  const GateUpShape out{check_weight("gate_weight", gate_weight, format_gate, k, x),
                        check_weight("up_weight", up_weight, format_up, k, x)};
  TORCH_CHECK_VALUE(out.gate.n == out.up.n, "up_weight: has ", out.up.n, " rows, gate_weight ",
                    out.gate.n);
  return out;
}

WeightShape check_swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                const at::Tensor& weight, const OptionalTensor& bias,
                                std::string_view format) {
  const Size k = check_activations("gate", gate);
  check_addend("up", up, gate.sym_sizes(), gate);
  const WeightShape w = check_weight("weight", weight, format, k, gate);
  check_addend("bias", bias, {w.n}, gate);
  return w;
}

WeightShape check_scaled(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                         const OptionalTensor& c, double beta, int64_t dim) {
  const Size k = check_activations("x", x);
  TORCH_CHECK_VALUE(x.dim() == dim, "x: shape ", x.sym_sizes(), "; must have ", dim, " dimensions");
  const WeightShape w = check_weight("weight", weight, format, k, x);
  std::vector<Size> shape = x.sym_sizes().vec();
  shape.back() = w.n;
  check_addend("c", c, shape, x);
  TORCH_CHECK_VALUE(beta == 0 || c.has_value(), "c: missing, but beta = ", beta);
  return w;
}

WeightShape check_dequantize(const at::Tensor& weight, std::string_view format,
                             const OptionalSize& in_features) {
  const Size k = resolve_in_features(weight, format, in_features);
  return check_weight("weight", weight, format, k, weight);
}

WeightShape check_embedding(const at::Tensor& ids, const at::Tensor& weight,
                            std::string_view format, const OptionalSize& in_features) {
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                    ids.scalar_type(), "; allowed: int64, int32");
  const Size k = resolve_in_features(weight, format, in_features);
  const WeightShape w = check_weight("weight", weight, format, k, ids);
  TORCH_CHECK_INDEX(w.n > 0 || ids.sym_numel() == 0, "ids: ", ids.sym_numel(),
                    " of them; the table has 0 rows");
  return w;
}

void check_ids(const at::Tensor& ids, int64_t rows) {
  if (!ids.numel() || !ids.is_cpu()) return;
  const at::Tensor flat = ids.to(at::kLong).contiguous();
  const int64_t *first = elements<int64_t>(flat), *last = first + flat.numel();
  const auto bad = std::find_if(first, last, [=](int64_t i) { return i < 0 || i >= rows; });
  TORCH_CHECK_INDEX(bad == last, "ids: ", bad == last ? 0 : *bad,
                    " is out of range; the table has ", rows, " rows");
}

const Format& check_quantize(const at::Tensor& w, std::string_view format) {
  const Format& f = check_format(format);
  const Size k = check_activations("w", w);
  TORCH_CHECK_VALUE(w.dim() == 2, "w: shape ", w.sym_sizes(), "; must be [N, K]");
  check_k("w", f, k);
  return f;
}

Op check_probe(const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  check_activation_dtype("x", x);
  check_device("x2", x2, x);
  TORCH_CHECK_VALUE(x2.scalar_type() == x.scalar_type() && x2.sym_sizes() == x.sym_sizes(),
                    "x2: ", x2.scalar_type(), " ", x2.sym_sizes(), "; must be as x, ",
                    x.scalar_type(), " ", x.sym_sizes());
  constexpr Op kProbes[] = {Op::kAdd, Op::kSub, Op::kMul, Op::kDiv, Op::kDot};
  return or_value_error([&] {
    return kProbes[find_name("op", op, std::size(kProbes),
                             [&](int i) { return to_string(kProbes[i]); })];
  });
}

at::ScalarType check_dtype(std::optional<at::ScalarType> dtype) {
  const at::ScalarType t = dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(find_dtype(t), "dtype: ", t, "; allowed: ", allowed_dtypes());
  return t;
}

}  // namespace metalmm
