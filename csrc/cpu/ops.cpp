// The ops on CPU tensors. Everything between two ops stays f32; the result is rounded once, to its
// dtype.
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "attention/attention.h"
#include "cpu/quantize/quantize.h"
#include "experts/experts.h"
#include "hooks/hooks.h"
#include "matmul.h"
#include "ops/checks.h"
#include "ops/composed.h"
#include "ops/dtypes.h"
#include "ops/strategies.h"
#include "ops/tensors.h"
#include "parallel.h"
#include "rows.h"

namespace metalmm::cpu {
namespace {

std::optional<Strategy> find_strategy(OptionalName name,
                                      Activations activations = Activations::kExact) {
  if (!name.has_value()) return std::nullopt;
  return or_value_error([&] { return strategy_by_name(*name, activations); });
}

at::Tensor as_f32_rows(const at::Tensor& x) { return as_rows(x, at::kFloat); }

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view format, OptionalName strategy, const OptionalTensor& residual,
                  OptionalName activations) {
  const PackedWeight w = packed(weight, check_linear(x, weight, bias, format, residual));
  const Activations rounding = check_activations(activations, x);
  const std::optional<Strategy> chosen = find_strategy(strategy, rounding);
  const at::Tensor rows = as_rows(x, x.scalar_type());
  return finish(matmul(rows, w.rows, w.format, x.scalar_type(), chosen, rounding), bias, residual,
                x);
}

at::Tensor norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight, double eps,
                       double offset, const at::Tensor& weight, const OptionalTensor& bias,
                       std::string_view format, const OptionalTensor& residual,
                       OptionalName activations) {
  const PackedWeight w = packed(
      weight, check_norm_linear(x, norm_weight, eps, offset, weight, bias, format, residual));
  const Activations rounding = check_activations(activations, x);
  const at::Tensor rows = normalized(as_f32_rows(x), norm_weight, eps, offset);
  const at::Tensor y = matmul(rows, w.rows, w.format, x.scalar_type(), std::nullopt, rounding);
  return finish(y, bias, residual, x);
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, double offset,
                    const OptionalTensor& residual) {
  check_rms_norm(x, weight, eps, offset, residual);
  return finish(normalized(as_f32_rows(x), weight, eps, offset), std::nullopt, residual, x);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps,
                                                double offset) {
  check_rms_norm(x, weight, eps, offset, residual);
  const at::Tensor sum = stored(x.to(at::kFloat) + residual, x.scalar_type());
  return {like_input(normalized(as_f32_rows(sum), weight, eps, offset), x), sum};
}

at::Tensor linear_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                             std::string_view format, int64_t in_features) {
  const PackedWeight w = packed(weight, check_input_grad(grad, weight, format, in_features));
  const at::Tensor out = times_decoded(as_f32_rows(grad), w.k, [&](int64_t first, int64_t last) {
    return decode_rows(w.rows, w.format, w.k, first, last);
  });
  return like_input(out, grad);
}

at::Tensor swiglu(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                  std::string_view format_gate, std::string_view format_up,
                  std::string_view activation, const OptionalTensor& norm_weight,
                  std::optional<double> eps, double offset, OptionalName activations) {
  const GateUpShape shape = check_swiglu(x, gate_weight, up_weight, format_gate, format_up,
                                         activation, norm_weight, eps, offset);
  const Activations rounding = check_activations(activations, x);
  const PackedWeight gate_w = packed(gate_weight, shape.gate), up_w = packed(up_weight, shape.up);
  at::Tensor rows = as_f32_rows(x);
  if (eps.has_value()) rows = normalized(rows, norm_weight, *eps, offset);
  const auto product = [&](const PackedWeight& w) {
    const auto y = matmul(rows, w.rows, w.format, x.scalar_type(), std::nullopt, rounding);
    return y.to(at::kFloat);
  };
  return like_input(composed::activate(product(gate_w), shape.activation).mul_(product(up_w)), x);
}

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias, std::string_view format,
                         std::string_view activation, const OptionalTensor& residual,
                         OptionalName activations) {
  const DownShape shape = check_swiglu_linear(gate, up, weight, bias, format, activation, residual);
  const Activations rounding = check_activations(activations, gate);
  const PackedWeight w = packed(weight, shape.weight);
  const at::Tensor hidden =
      composed::activate(as_f32_rows(gate).contiguous(), shape.activation).mul_(as_f32_rows(up));
  const at::Tensor y = matmul(hidden, w.rows, w.format, gate.scalar_type(), std::nullopt, rounding);
  return finish(y, bias, residual, gate);
}

at::Tensor scaled_matmul(const at::Tensor& x, const at::Tensor& weight, std::string_view format,
                         const OptionalTensor& c, double alpha, double beta, OptionalName strategy,
                         int64_t dim) {
  const PackedWeight w = packed(weight, check_scaled(x, weight, format, c, alpha, beta, dim));
  at::Tensor y = matmul(as_rows(x, x.scalar_type()), w.rows, w.format, x.scalar_type(),
                        find_strategy(strategy, Activations::kExact));
  if (alpha != 1 || beta != 0) y = y.to(at::kFloat);
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
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_dequantize(weight, format, in_features));
  const int64_t n = w.rows.size(0);
  if (type == at::kFloat) return decode_rows(w.rows, w.format, w.k, 0, n);
  at::Tensor out = at::empty({n, w.k}, w.rows.options().dtype(type));
  const int64_t most = streamed_rows(w.k);
  for (int64_t r = 0; r < n; r += most) {
    const int64_t last = std::min(n, r + most);
    out.narrow(0, r, last - r).copy_(decode_rows(w.rows, w.format, w.k, r, last));
  }
  return out;
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::string_view format,
                     std::optional<int64_t> in_features, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = check_dtype(dtype);
  const PackedWeight w = packed(weight, check_embedding(ids, weight, format, in_features));
  check_ids(ids, w.rows.size(0));
  const at::Tensor flat = ids.to(at::kLong).contiguous();
  const int64_t* id = elements<int64_t>(flat);
  const int64_t count = flat.numel(), k = w.k;
  at::Tensor out = at::empty({count, k}, w.rows.options().dtype(at::kFloat));
  const Weight table = make_weight(w.rows, w.format, k);
  const DecodeKernel decode = kernels_of(w.format).decode;
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, count, 8, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decode(table, id[i], 0, k, to + i * k);
  });
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(k);
  return out.view(shape).to(type);
}

at::Tensor probe(const at::Tensor& x, const at::Tensor& x2, std::string_view op) {
  const Op which = check_probe(x, x2, op);
  const at::Tensor a = x.to(at::kFloat), b = x2.to(at::kFloat);
  const auto compute = [&] {
    switch (which) {
      case Op::kAdd:
        return a + b;
      case Op::kSub:
        return a - b;
      case Op::kMul:
        return a * b;
      case Op::kDiv:
        return a / b;
      default:
        return at::dot(a.flatten(), b.flatten());
    }
  };
  return compute().to(x.scalar_type()).contiguous();
}

// As quantize_row takes it. ValueError: an element is negative, NaN or Inf.
at::Tensor normalised(const at::Tensor& importance) {
  at::Tensor out = importance.detach().clone(at::MemoryFormat::Contiguous);
  float* first = out.mutable_data_ptr<float>();
  const float* bad = std::find_if(first, first + out.numel(), [](float v) {
    return !(v >= 0 && v <= std::numeric_limits<float>::max());
  });
  TORCH_CHECK_VALUE(bad == first + out.numel(), "importance: element ", bad - first,
                    " is negative, NaN or Inf");
  normalise_importance(first, out.numel());
  return out;
}

// w f32 / f16 / bf16 [N, K] -> uint8 [N, row_bytes]. ValueError on NaN or Inf.
at::Tensor quantize(const at::Tensor& w, std::string_view format,
                    const OptionalTensor& importance) {
  const Format& f = check_quantize(w, format, importance);
  const at::Tensor costs = importance ? normalised(*importance) : at::Tensor();
  const float* cost = importance ? elements<float>(costs) : nullptr;
  const int64_t n = w.size(0), k = w.size(1), row_bytes = f.row_bytes(k);
  at::Tensor out = at::empty({n, row_bytes}, w.options().dtype(at::kByte));
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  // An f32 copy larger than the result would leave a hole in the heap that the next result takes:
  // with 32 MB at a time, packing a model weight by weight took 2.1 times its bytes.
  const int64_t most = streamed_rows(k, 1 << 18);
  std::atomic<int64_t> bad_row{n};
  for (int64_t r = 0; r < n && bad_row == n; r += most) {
    const int64_t rows = std::min(most, n - r);
    const at::Tensor source = w.detach().narrow(0, r, rows).to(at::kFloat).contiguous();
    const float* from = elements<float>(source);
    parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (all_finite(from + i * k, k)) {
          quantize_row(f, from + i * k, k, to + (r + i) * row_bytes, cost);
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

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, CPU, m) {
  hooks().cpu_strategy = [](int64_t rows, DType dtype) {
    return kStrategyNames[static_cast<int>(choose_strategy(rows, torch_dtype(dtype)))];
  };
  hooks().cpu_attention = [](const Problem& p) {
    return kAttentionWays[static_cast<int>(choose_way(p))];
  };
  set_strategy_check(at::kCPU, [](std::string_view name, Activations activations) {
    strategy_by_name(name, activations);
  });
#define MM_OP(name, ...) m.impl(#name, name);
#include "ops/ops.def"
}

}  // namespace metalmm::cpu
