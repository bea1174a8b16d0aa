// The ops on CPU tensors. Everything between two ops stays f32; the result is rounded once, to its
// dtype.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <string>

#include "../checks.h"
#include "matmul.h"
#include "parallel.h"
#include "quantize.h"

namespace metalmm::cpu {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string_view>;

// Values decoded at a time where a whole dense W is never wanted: 32 MB of f32.
constexpr int64_t kStreamedValues = 8 << 20;

int64_t streamed_rows(int64_t k) {
  return std::max<int64_t>(1, kStreamedValues / std::max<int64_t>(k, 1));
}

std::optional<Strategy> check_strategy(OptionalName name) {
  if (!name.has_value()) return std::nullopt;
  try {
    return strategy_by_name(*name);
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

// x [..., K] as f32 [M, K] with dense rows.
at::Tensor as_matrix(const at::Tensor& x) {
  const int64_t k = x.size(-1);
  const at::Tensor rows = x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), k});
  const at::Tensor f32 = rows.to(at::kFloat);
  return f32.stride(1) == 1 || k <= 1 ? f32 : f32.contiguous();
}

// f32 [M, n] as [..., n] in the dtype of x, with the leading dimensions of x.
at::Tensor like_input(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = y.size(1);
  return y.view(shape).to(x.scalar_type());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view format, OptionalName strategy) {
  const Format& f = check_format(format);
  const at::Tensor w = check_weight("weight", weight, f, check_activations("x", x), x);
  check_addend("bias", bias, {w.size(0)}, x);
  at::Tensor y = matmul(as_matrix(x), w, f, check_strategy(strategy));
  if (bias.has_value()) y.add_(bias->to(at::kFloat));
  return like_input(y, x);
}

at::Tensor linear_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features) {
  const Format& f = check_format(format);
  const int64_t n = check_activations("grad", grad);
  const at::Tensor w = check_weight("weight", weight, f, in_features, grad);
  TORCH_CHECK_VALUE(n == w.size(0), "grad: last size ", n, "; weight has ", w.size(0), " rows");
  const at::Tensor g = as_matrix(grad);
  at::Tensor out = at::zeros({g.size(0), in_features}, g.options());
  const int64_t step = streamed_rows(in_features);
  for (int64_t r = 0; r < n; r += step) {
    const int64_t last = std::min(n, r + step);
    out.addmm_(g.narrow(1, r, last - r), decode_rows(w, f, in_features, r, last));
  }
  return like_input(out, grad);
}

at::Tensor swiglu(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                  std::string_view format_gate, std::string_view format_up) {
  const Format &fg = check_format(format_gate), &fu = check_format(format_up);
  const int64_t k = check_activations("x", x);
  const at::Tensor wg = check_weight("gate_weight", gate_weight, fg, k, x);
  const at::Tensor wu = check_weight("up_weight", up_weight, fu, k, x);
  TORCH_CHECK_VALUE(wg.size(0) == wu.size(0), "up_weight: has ", wu.size(0), " rows, gate_weight ",
                    wg.size(0));
  const at::Tensor flat = as_matrix(x);
  at::Tensor gate = matmul(flat, wg, fg, std::nullopt);
  return like_input(at::silu_(gate).mul_(matmul(flat, wu, fu, std::nullopt)), x);
}

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias, std::string_view format) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("gate", gate);
  check_addend("up", up, gate.sizes(), gate);
  const at::Tensor w = check_weight("weight", weight, f, k, gate);
  check_addend("bias", bias, {w.size(0)}, gate);
  const at::Tensor hidden = at::silu(as_matrix(gate)).mul_(as_matrix(up));
  at::Tensor y = matmul(hidden, w, f, std::nullopt);
  if (bias.has_value()) y.add_(bias->to(at::kFloat));
  return like_input(y, gate);
}

at::Tensor scaled_matmul(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                         const OptionalTensor& c, double alpha, double beta, OptionalName strategy,
                         int64_t dim) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("x", x);
  TORCH_CHECK_VALUE(x.dim() == dim, "x: shape ", x.sizes(), "; must have ", dim, " dimensions");
  const at::Tensor w = check_weight("weight", weight, f, k, x);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  check_addend("c", c, shape, x);
  TORCH_CHECK_VALUE(beta == 0 || c.has_value(), "c: missing, but beta = ", beta);
  at::Tensor y = matmul(as_matrix(x), w, f, check_strategy(strategy));
  if (alpha != 1) y.mul_(alpha);
  if (beta != 0) y.add_(c->to(at::kFloat).view_as(y), beta);
  return like_input(y, x);
}

at::Tensor gemv(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                const OptionalTensor& c, double alpha, double beta, OptionalName strategy) {
  return scaled_matmul(x, weight, format, c, alpha, beta, strategy, 1);
}

at::Tensor gemm(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                const OptionalTensor& c, double alpha, double beta, OptionalName strategy) {
  return scaled_matmul(x, weight, format, c, alpha, beta, strategy, 2);
}

at::Tensor dequantize(const at::Tensor& weight, std::string_view format,
                      std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const Format& f = check_format(format);
  const at::ScalarType type = check_dtype(dtype);
  const int64_t k = resolve_in_features(weight, f, in_features);
  const at::Tensor w = check_weight("weight", weight, f, k, weight);
  const int64_t n = w.size(0);
  if (type == at::kFloat) return decode_rows(w, f, k, 0, n);
  at::Tensor out = at::empty({n, k}, w.options().dtype(type));
  const int64_t step = streamed_rows(k);
  for (int64_t r = 0; r < n; r += step) {
    const int64_t last = std::min(n, r + step);
    out.narrow(0, r, last - r).copy_(decode_rows(w, f, k, r, last));
  }
  return out;
}

bool all_finite(const float* x, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(std::fabs(x[i]) <= std::numeric_limits<float>::max());
  return !bad;
}

at::Tensor quantize(const at::Tensor& w, std::string_view format) {
  const Format& f = check_format(format);
  const int64_t k = check_activations("w", w);
  TORCH_CHECK_VALUE(w.dim() == 2, "w: shape ", w.sizes(), "; must be [N, K]");
  TORCH_CHECK_VALUE(k % f.block_values == 0, "w: K = ", k, " is not a multiple of the block of ",
                    f.name, ", ", f.block_values, " values");
  const int64_t n = w.size(0), row_bytes = f.row_bytes(k);
  at::Tensor out = at::empty({n, row_bytes}, w.options().dtype(at::kByte));
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  const int64_t step = streamed_rows(k);
  std::atomic<int64_t> bad_row{n};
  for (int64_t r = 0; r < n && bad_row == n; r += step) {
    const int64_t rows = std::min(step, n - r);
    const at::Tensor source = w.detach().narrow(0, r, rows).to(at::kFloat).contiguous();
    const float* from = source.const_data_ptr<float>();
    parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (all_finite(from + i * k, k)) {
          quantize_row(f, from + i * k, k, to + (r + i) * row_bytes);
        } else {
          int64_t seen = bad_row;
          while (r + i < seen && !bad_row.compare_exchange_weak(seen, r + i)) {
          }
        }
      }
    });
  }
  TORCH_CHECK_VALUE(bad_row == n, "w: row ", bad_row.load(), " has NaN or Inf");
  return out;
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::string_view format,
                     std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const Format& f = check_format(format);
  const at::ScalarType type = check_dtype(dtype);
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                    ids.scalar_type(), "; allowed: int64, int32");
  const int64_t k = resolve_in_features(weight, f, in_features);
  const at::Tensor w = check_weight("weight", weight, f, k, ids);
  const at::Tensor flat = ids.to(at::kLong).contiguous();
  const int64_t* id = flat.const_data_ptr<int64_t>();
  const int64_t count = flat.numel(), n = w.size(0);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < n, "ids: ", id[i], " is out of range; the table has ",
                      n, " rows");
  }
  at::Tensor out = at::empty({count, k}, w.options().dtype(at::kFloat));
  const Weight table = make_weight(w, f, k);
  const DecodeKernel decode = current_isa().codec[static_cast<int>(f.codec)].decode;
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, count, 8, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decode(table, id[i], 0, k, to + i * k);
  });
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(k);
  return out.view(shape).to(type);
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_input_grad", linear_input_grad);
  m.impl("swiglu", swiglu);
  m.impl("swiglu_linear", swiglu_linear);
  m.impl("gemv", gemv);
  m.impl("gemm", gemm);
  m.impl("dequantize", dequantize);
  m.impl("quantize", quantize);
  m.impl("embedding", embedding);
}

}  // namespace metalmm::cpu
