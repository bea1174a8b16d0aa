#include "checks.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "dtypes.h"
#include "metal/geometry.h"
#include "tensors.h"

namespace metalmm {
namespace {

using Size = c10::SymInt;

std::string allowed_dtypes() {
  return join_names(kNumDTypes, [](int i) { return kTorchDTypes[i]; });
}

// check_addend of the sizes of x, the last one replaced by n.
void check_rows_addend(const char* name, const OptionalTensor& t, const at::Tensor& x,
                       const Size& n) {
  if (!t.has_value()) return;
  std::vector<Size> shape = x.sym_sizes().vec();
  shape.back() = n;
  check_addend(name, t, shape, x);
}

void check_norm_numbers(const char* name, bool has_weight, double eps, double offset) {
  check_f32("eps", eps);
  TORCH_CHECK_VALUE(eps >= 0, "eps: ", eps, "; must be 0 or more");
  check_f32("offset", offset);
  TORCH_CHECK_VALUE(has_weight || offset == 0, name, ": missing, but offset = ", offset);
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

void check_activation_dtype(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(find_dtype(t.scalar_type()), name, ": dtype ", t.scalar_type(),
                    "; allowed: ", allowed_dtypes());
}

void check_f32(const char* name, double number) {
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(number)), name, ": ", number,
                    "; must be finite as f32");
}

void check_softcap(double softcap) {
  check_f32("softcap", softcap);
  TORCH_CHECK_VALUE(softcap == 0 || softcap >= std::numeric_limits<float>::min(),
                    "softcap: ", softcap,
                    "; must be a normal number of f32 above 0, or 0 for none");
}

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

Size check_rows(const char* name, const at::Tensor& x) {
  check_activation_dtype(name, x);
  TORCH_CHECK_VALUE(x.dim() >= 1, name, ": must have at least one dimension, [..., K]");
  return x.sym_size(-1);
}

void check_row(const char* name, const at::Tensor& rows, const Format& format, const Size& k) {
  const bool is_packed = rows.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(is_packed || is_dense(format, rows.scalar_type()), name, ": dtype ",
                    rows.scalar_type(), "; allowed: uint8 rows of ", format.name);
  const Size row = is_packed ? format.row_bytes(k) : k;
  TORCH_CHECK_VALUE(rows.sym_size(-1) == row, name, ": shape ", rows.sym_sizes(), "; a row of ", k,
                    " values in ", format.name, " has ", row, is_packed ? " bytes" : " values");
}

WeightShape check_weight(const char* name, const at::Tensor& weight, std::string_view format_name,
                         const Size& k, const at::Tensor& x, bool of_experts) {
  const Format& format = check_format(format_name);
  check_k(name, format, k);
  check_device(name, weight, x);
  TORCH_CHECK_VALUE(weight.dim() == (of_experts ? 3 : 2), name, ": shape ", weight.sym_sizes(),
                    "; must be ", of_experts ? "[E, N, row_bytes]" : "[N, row_bytes]");
  check_row(name, weight, format, k);
  return {format, weight.sym_size(-2), k};
}

void check_addend(const char* name, const OptionalTensor& t, c10::SymIntArrayRef shape,
                  const at::Tensor& x) {
  if (!t.has_value()) return;
  check_device(name, *t, x);
  check_activation_dtype(name, *t);
  TORCH_CHECK_VALUE(t->sym_sizes() == shape, name, ": shape ", t->sym_sizes(), "; must be ", shape);
}

PackedWeight packed(const at::Tensor& weight, const WeightShape& checked) {
  const int64_t k = checked.k.expect_int();
  if (weight.scalar_type() != at::kByte) {
    // Not contiguous(): to torch rows of one value, or none, are contiguous whatever their stride.
    const at::Tensor rows =
        weight.stride(-1) == 1 ? weight.contiguous() : weight.clone(at::MemoryFormat::Contiguous);
    return {checked.format, rows.view(at::kByte), k};
  }
  const bool dense = weight.stride(-1) == 1 || weight.numel() == 0;
  return {checked.format, dense ? weight : weight.contiguous(), k};
}

namespace {

// The checks that all products of rows of x share.
template <class Args>
WeightShape check_product(const Args& a) {
  const WeightShape w = check_weight("weight", a.weight, a.format, check_rows("x", a.x), a.x);
  check_addend("bias", a.bias, {w.n}, a.x);
  check_rows_addend("residual", a.residual, a.x, w.n);
  return w;
}

// The norm of the rows of x. `name` is the argument that its weight is.
void check_norm(const char* name, const at::Tensor& x, const OptionalTensor& weight, double eps,
                double offset) {
  check_addend(name, weight, {check_rows("x", x)}, x);
  check_norm_numbers(name, weight.has_value(), eps, offset);
}

template <class Args>
WeightShape check_scaled(const Args& a, int64_t dim) {
  const Size k = check_rows("x", a.x);
  TORCH_CHECK_VALUE(a.x.dim() == dim, "x: shape ", a.x.sym_sizes(), "; must have ", dim,
                    " dimensions");
  const WeightShape w = check_weight("weight", a.weight, a.format, k, a.x);
  check_rows_addend("c", a.c, a.x, w.n);
  check_f32("alpha", a.alpha);
  check_f32("beta", a.beta);
  TORCH_CHECK_VALUE(a.beta == 0 || a.c.has_value(), "c: missing, but beta = ", a.beta);
  return w;
}

}  // namespace

WeightShape check(const args::linear& a) { return check_product(a); }

WeightShape check(const args::norm_linear& a) {
  check_norm("norm_weight", a.x, a.norm_weight, a.eps, a.offset);
  const WeightShape w = check_product(a);
  check_addend("factors", a.factors, {w.n}, a.x);
  TORCH_CHECK_VALUE(!a.factors.has_value() || !a.bias.has_value(),
                    "factors: given with bias; allowed: one of both");
  return w;
}

void check(const args::rms_norm& a) {
  if (a.weight.has_value() && a.weight->dim() == 2) {
    const Size k = check_rows("x", a.x);
    TORCH_CHECK_VALUE(a.x.dim() >= 2, "weight: shape ", a.weight->sym_sizes(), "; must be [", k,
                      "]");
    check_addend("weight", a.weight, {a.x.sym_size(-2), k}, a.x);
    check_norm_numbers("weight", true, a.eps, a.offset);
  } else {
    check_norm("weight", a.x, a.weight, a.eps, a.offset);
  }
  check_addend("residual", a.residual, a.x.sym_sizes(), a.x);
  check_addend("gate", a.gate, a.x.sym_sizes(), a.x);
}

void check(const args::add_rms_norm& a) {
  check_norm("weight", a.x, a.weight, a.eps, a.offset);
  check_addend("residual", a.residual, a.x.sym_sizes(), a.x);
}

void check(const args::hadamard& a) {
  const Size dim = check_rows("x", a.x);
  TORCH_CHECK_VALUE(dim % kHadamardValues == 0, "x: rows of ", dim,
                    " values; must be a multiple of ", kHadamardValues);
}

RopeShape check(const args::rope& a) {
  const Tensor &qkv = a.qkv, &cos = a.cos;
  check_activation_dtype("qkv", qkv);
  TORCH_CHECK_VALUE(qkv.dim() == 3, "qkv: shape ", qkv.sym_sizes(), "; must be [B, S, values]");
  TORCH_CHECK_VALUE(cos.dim() == 3, "cos: shape ", cos.sym_sizes(), "; must be [B or 1, S, R]");
  TORCH_CHECK_VALUE(a.heads >= 1, "heads: ", a.heads, "; at least 1");
  TORCH_CHECK_VALUE(a.kv_heads >= 0, "kv_heads: ", a.kv_heads, "; may not be negative");
  TORCH_CHECK_VALUE(a.heads <= kMaxK && a.kv_heads <= kMaxK, "heads, kv_heads: ", a.heads, ", ",
                    a.kv_heads, "; at most ", kMaxK);
  const int64_t all = a.heads + (a.v.has_value() ? 1 : 2) * a.kv_heads;
  const Size dim = qkv.sym_size(2) / all;
  TORCH_CHECK_VALUE(dim * all == qkv.sym_size(2) && dim >= 1, "qkv: ", qkv.sym_size(2),
                    " values a position; must be a multiple of its ", all, " heads");
  const auto is_of_all = [&](const OptionalTensor& weight, int64_t heads) {
    return heads > 1 && weight.has_value() && weight->dim() == 1 &&
           weight->sym_size(0) == dim * heads;
  };
  const bool whole = is_of_all(a.q_norm, a.heads) || is_of_all(a.k_norm, a.kv_heads);
  const RopeShape out{qkv.sym_size(0), qkv.sym_size(1), dim, cos.sym_size(-1), whole};
  check_addend("v", a.v, {out.batch, out.positions, dim * a.kv_heads}, qkv);
  check_addend("q_norm", a.q_norm, {out.has_whole_norms ? dim * a.heads : dim}, qkv);
  check_addend("k_norm", a.k_norm, {out.has_whole_norms ? dim * a.kv_heads : dim}, qkv);
  check_norm_numbers("q_norm", a.q_norm.has_value() || a.k_norm.has_value(), a.eps, a.offset);
  TORCH_CHECK_VALUE(
      cos.sym_size(1) == out.positions && (cos.sym_size(0) == 1 || cos.sym_size(0) == out.batch),
      "cos: shape ", cos.sym_sizes(), "; must be [1 or ", out.batch, ", ", out.positions, ", R]");
  TORCH_CHECK_VALUE(out.rotated <= dim && out.rotated % 2 == 0, "cos: rotates ", out.rotated,
                    " values of a head of ", dim, "; must be even, and no more");
  check_addend("cos", cos, cos.sym_sizes(), qkv);
  check_addend("sin", a.sin, cos.sym_sizes(), qkv);
  return out;
}

WeightShape check(const args::linear_input_grad& a) {
  const Size n = check_rows("grad", a.grad);
  const WeightShape w = check_weight("weight", a.weight, a.format, a.in_features, a.grad);
  TORCH_CHECK_VALUE(n == w.n, "grad: last size ", n, "; weight has ", w.n, " rows");
  return w;
}

GateUpShape check(const args::swiglu& a) {
  const Size k = check_rows("x", a.x);
  const GateUpShape out{check_weight("gate_weight", a.gate_weight, a.format_gate, k, a.x),
                        check_weight("up_weight", a.up_weight, a.format_up, k, a.x),
                        or_value_error([&] { return activation_by_name(a.activation); })};
  TORCH_CHECK_VALUE(out.gate.n == out.up.n, "up_weight: has ", out.up.n, " rows, gate_weight ",
                    out.gate.n);
  TORCH_CHECK_VALUE(a.eps.has_value() || !a.norm_weight.has_value(),
                    "eps: missing, but norm_weight is given");
  check_norm("norm_weight", a.x, a.norm_weight, a.eps.value_or(0), a.offset);
  check_f32("gate_scale", a.gate_scale);
  return out;
}

DownShape check(const args::swiglu_linear& a) {
  const Size k = check_rows("gate", a.gate);
  check_addend("up", a.up, a.gate.sym_sizes(), a.gate);
  const DownShape out{check_weight("weight", a.weight, a.format, k, a.gate),
                      or_value_error([&] { return activation_by_name(a.activation); })};
  check_addend("bias", a.bias, {out.weight.n}, a.gate);
  check_rows_addend("residual", a.residual, a.gate, out.weight.n);
  return out;
}

WeightShape check(const args::gemv& a) { return check_scaled(a, 1); }
WeightShape check(const args::gemm& a) {
  check_softcap(a.softcap);
  return check_scaled(a, 2);
}

WeightShape check(const args::dequantize& a) {
  const Size k = resolve_in_features(a.weight, a.format, a.in_features);
  return check_weight("weight", a.weight, a.format, k, a.weight);
}

WeightShape check(const args::embedding& a) {
  TORCH_CHECK_VALUE(a.ids.scalar_type() == at::kLong || a.ids.scalar_type() == at::kInt,
                    "ids: dtype ", a.ids.scalar_type(), "; allowed: int64, int32");
  const Size k = resolve_in_features(a.weight, a.format, a.in_features);
  const WeightShape w = check_weight("weight", a.weight, a.format, k, a.ids);
  TORCH_CHECK_INDEX(w.n > 0 || a.ids.sym_numel() == 0, "ids: ", a.ids.sym_numel(),
                    " of them; the table has 0 rows");
  if (a.scale.has_value()) {
    check_activation_dtype("scale", *a.scale);
    check_device("scale", *a.scale, a.ids);
    TORCH_CHECK_VALUE(a.scale->sym_numel() == 1 || a.scale->sym_numel() == w.n, "scale: shape ",
                      a.scale->sym_sizes(), "; must be one value or ", w.n, ", one for each row");
  }
  return w;
}

Shape check(const args::rope_tables& a) {
  const Tensor &p = a.positions, &f = a.inv_freq;
  const int64_t dims = a.axes.has_value() ? 3 : 2;
  TORCH_CHECK_VALUE(p.scalar_type() == at::kLong && p.dim() == dims, "positions: ", p.scalar_type(),
                    " ", p.sym_sizes(), "; must be int64 ", dims == 3 ? "[A, B, S]" : "[B, S]");
  TORCH_CHECK_VALUE(f.scalar_type() == at::kFloat && f.dim() == 1 && f.sym_size(0) >= 1,
                    "inv_freq: ", f.scalar_type(), " ", f.sym_sizes(), "; must be float32 [F]");
  check_device("inv_freq", f, p);
  if (a.axes.has_value()) {
    TORCH_CHECK_VALUE(a.axes->scalar_type() == at::kLong && a.axes->sym_sizes() == f.sym_sizes(),
                      "axes: ", a.axes->scalar_type(), " ", a.axes->sym_sizes(), "; must be int64 ",
                      f.sym_sizes());
    check_device("axes", *a.axes, p);
    TORCH_CHECK_VALUE(p.sym_size(0) >= 1, "positions: shape ", p.sym_sizes(), "; axes name none");
  }
  TORCH_CHECK_VALUE(a.twice || !a.interleaved, "interleaved: True; only where twice");
  check_f32("scale", a.scale);
  return {p.sym_size(dims - 2), p.sym_size(dims - 1), f.sym_size(0) * (a.twice ? 2 : 1)};
}

void check_ids(const at::Tensor& ids, int64_t count, const char* in, const char* what,
               const char* name) {
  if (!ids.numel() || !ids.is_cpu()) return;
  const at::Tensor flat = ids.to(at::kLong).contiguous();
  const int64_t *first = elements<int64_t>(flat), *last = first + flat.numel();
  const auto bad = std::find_if(first, last, [=](int64_t i) { return i < 0 || i >= count; });
  TORCH_CHECK_INDEX(bad == last, name, ": ", bad == last ? 0 : *bad, " is out of range; ", in,
                    " has ", count, " ", what);
}

void check_packs(const char* name, const Format& f) {
  TORCH_CHECK_VALUE(f.packs, name, ": ", f.name,
                    " is only read here: llama.cpp chooses its codes by an importance matrix, and "
                    "no quantizer of this package makes them, with one or without; load a file in "
                    "it, or quantize to another format");
}

const Format& check(const args::quantize& a) {
  const Format& f = check_format(a.format);
  check_packs("format", f);
  const Size k = check_rows("w", a.w);
  TORCH_CHECK_VALUE(a.w.dim() == 2, "w: shape ", a.w.sym_sizes(), "; must be [N, K]");
  check_k("w", f, k);
  if (a.importance) {
    const Tensor& costs = *a.importance;
    check_device("importance", costs, a.w);
    TORCH_CHECK_VALUE(
        costs.scalar_type() == at::kFloat && costs.dim() == 1 && costs.sym_size(0) == k,
        "importance: ", costs.scalar_type(), " ", costs.sym_sizes(), "; must be float32 [K] = [", k,
        "]");
  }
  return f;
}

Op check(const args::probe& a) {
  const Tensor &x = a.x, &x2 = a.x2;
  check_activation_dtype("x", x);
  check_device("x2", x2, x);
  TORCH_CHECK_VALUE(x2.scalar_type() == x.scalar_type() && x2.sym_sizes() == x.sym_sizes(),
                    "x2: ", x2.scalar_type(), " ", x2.sym_sizes(), "; must be as x, ",
                    x.scalar_type(), " ", x.sym_sizes());
  constexpr Op kProbes[] = {Op::kAdd, Op::kSub, Op::kMul, Op::kDiv, Op::kDot};
  return or_value_error([&] {
    return kProbes[find_name("op", a.op, std::size(kProbes),
                             [&](int i) { return to_string(kProbes[i]); })];
  });
}

at::ScalarType check_dtype(std::optional<at::ScalarType> dtype) {
  const at::ScalarType t = dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(find_dtype(t), "dtype: ", t, "; allowed: ", allowed_dtypes());
  return t;
}

}  // namespace metalmm
