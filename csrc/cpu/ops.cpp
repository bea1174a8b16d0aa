#include "ops.h"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "cpu/quantize/quantize.h"
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

// x Wᵀ of gemv and gemm, scaled.
template <class Args>
at::Tensor scaled_matmul(const Args& a, double softcap = 0) {
  const PackedWeight w = packed(a.weight, check(a));
  at::Tensor y = matmul(as_rows(a.x, a.x.scalar_type()), w.rows, w.format, a.x.scalar_type(),
                        find_strategy(a.strategy));
  if (a.alpha != 1 || a.beta != 0 || softcap != 0) y = y.to(at::kFloat);
  if (a.alpha != 1) y.mul_(a.alpha);
  if (a.beta != 0) y.add_(a.c->to(at::kFloat).view_as(y), a.beta);
  if (softcap != 0) y = composed::soft_cap(y, softcap);
  return like_input(std::move(y), a.x);
}

}  // namespace

at::Tensor linear(const args::linear& a) {
  const PackedWeight w = packed(a.weight, check(a));
  const Activations rounding = check_activations(a.activations, a.x);
  const std::optional<Strategy> chosen = find_strategy(a.strategy, rounding);
  const at::Tensor rows = as_rows(a.x, a.x.scalar_type());
  return finish(matmul(rows, w.rows, w.format, a.x.scalar_type(), chosen, rounding), a.bias,
                a.residual, a.x);
}

at::Tensor norm_linear(const args::norm_linear& a) {
  const PackedWeight w = packed(a.weight, check(a));
  const Activations rounding = check_activations(a.activations, a.x);
  const at::Tensor rows = normalized(as_f32_rows(a.x), a.norm_weight, a.eps, a.offset);
  at::Tensor y = matmul(rows, w.rows, w.format, a.x.scalar_type(), std::nullopt, rounding);
  if (a.factors.has_value()) y = y.to(at::kFloat).mul_(a.factors->to(at::kFloat));
  return finish(std::move(y), a.bias, a.residual, a.x);
}

at::Tensor rms_norm(const args::rms_norm& a) {
  check(a);
  at::Tensor y = normalized(as_f32_rows(a.x), a.weight, a.eps, a.offset);
  if (a.gate.has_value()) y.mul_(at::silu(as_f32_rows(*a.gate)));
  return finish(std::move(y), std::nullopt, a.residual, a.x);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const args::add_rms_norm& a) {
  check(a);
  const at::Tensor sum = stored(a.x.to(at::kFloat) + a.residual, a.x.scalar_type());
  return {like_input(normalized(as_f32_rows(sum), a.weight, a.eps, a.offset), a.x), sum};
}

at::Tensor linear_input_grad(const args::linear_input_grad& a) {
  const PackedWeight w = packed(a.weight, check(a));
  const at::Tensor out = times_decoded(as_f32_rows(a.grad), w.k, [&](int64_t first, int64_t last) {
    return decode_rows(w.rows, w.format, w.k, first, last);
  });
  return like_input(out, a.grad);
}

at::Tensor swiglu(const args::swiglu& a) {
  const GateUpShape shape = check(a);
  const Activations rounding = check_activations(a.activations, a.x);
  const PackedWeight gate_w = packed(a.gate_weight, shape.gate);
  const PackedWeight up_w = packed(a.up_weight, shape.up);
  at::Tensor rows = as_f32_rows(a.x);
  if (a.eps.has_value()) rows = normalized(rows, a.norm_weight, *a.eps, a.offset);
  const auto product = [&](const PackedWeight& w) {
    const auto y = matmul(rows, w.rows, w.format, a.x.scalar_type(), std::nullopt, rounding);
    return y.to(at::kFloat);
  };
  at::Tensor gate = product(gate_w);
  if (a.gate_scale != 1) gate = gate * a.gate_scale;
  return like_input(composed::activate(gate, shape.activation).mul_(product(up_w)), a.x);
}

at::Tensor swiglu_linear(const args::swiglu_linear& a) {
  const DownShape shape = check(a);
  const Activations rounding = check_activations(a.activations, a.gate);
  const PackedWeight w = packed(a.weight, shape.weight);
  const at::Tensor hidden = composed::activate(as_f32_rows(a.gate).contiguous(), shape.activation)
                                .mul_(as_f32_rows(a.up));
  at::Tensor y = matmul(hidden, w.rows, w.format, a.gate.scalar_type(), std::nullopt, rounding);
  return finish(std::move(y), a.bias, a.residual, a.gate);
}

at::Tensor gemv(const args::gemv& a) { return scaled_matmul(a); }
at::Tensor gemm(const args::gemm& a) { return scaled_matmul(a, a.softcap); }

at::Tensor dequantize(const args::dequantize& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  const PackedWeight w = packed(a.weight, check(a));
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

at::Tensor embedding(const args::embedding& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  const PackedWeight w = packed(a.weight, check(a));
  check_ids(a.ids, w.rows.size(0));
  const at::Tensor flat = a.ids.to(at::kLong).contiguous();
  const int64_t* id = elements<int64_t>(flat);
  const int64_t count = flat.numel(), k = w.k;
  at::Tensor out = at::empty({count, k}, w.rows.options().dtype(at::kFloat));
  const Weight table = make_weight(w.rows, w.format, k);
  const DecodeKernel decode = kernels_of(w.format).decode;
  float* to = out.mutable_data_ptr<float>();
  parallel_for(0, count, 8, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decode(table, id[i], 0, k, to + i * k);
  });
  std::vector<int64_t> shape = a.ids.sizes().vec();
  shape.push_back(k);
  out = out.view(shape).to(type);
  if (!a.scale.has_value()) return out;
  at::Tensor scale = a.scale->to(at::kFloat).flatten();
  if (scale.numel() > 1) scale = scale.index_select(0, flat.flatten()).view(a.ids.sizes());
  return (out.to(at::kFloat) * scale.unsqueeze(-1)).to(type);
}

// By torch's cos and sin, so that the tables are those of models' own modules to the bit.
std::tuple<at::Tensor, at::Tensor> rope_tables(const args::rope_tables& a) {
  const at::ScalarType type = check_dtype(a.dtype);
  check(a);
  if (a.axes.has_value()) check_ids(*a.axes, a.positions.size(0), "positions", "rows", "axes");
  at::Tensor positions = a.positions.unsqueeze(-1);
  if (a.axes.has_value()) positions = a.positions.index_select(0, *a.axes).permute({1, 2, 0});
  const at::Tensor angles = (positions.to(at::kFloat) * a.inv_freq).contiguous();
  const auto table = [&](const at::Tensor& t) {
    at::Tensor out = (t * a.scale).to(type);
    if (a.twice && a.interleaved) return at::stack({out, out}, -1).flatten(2);
    return a.twice ? at::cat({out, out}, -1) : out;
  };
  return {table(angles.cos()), table(angles.sin())};
}

at::Tensor probe(const args::probe& a) {
  const Op which = check(a);
  const at::Tensor x = a.x.to(at::kFloat), x2 = a.x2.to(at::kFloat);
  const auto compute = [&] {
    switch (which) {
      case Op::kAdd:
        return x + x2;
      case Op::kSub:
        return x - x2;
      case Op::kMul:
        return x * x2;
      case Op::kDiv:
        return x / x2;
      default:
        return at::dot(x.flatten(), x2.flatten());
    }
  };
  return compute().to(a.x.scalar_type()).contiguous();
}

namespace {

// Importance as quantize_row takes it. ValueError: an element is negative, NaN or Inf.
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

}  // namespace

// ValueError on NaN or Inf.
at::Tensor quantize(const args::quantize& a) {
  const Format& f = check(a);
  const at::Tensor& w = a.w;
  const at::Tensor costs = a.importance ? normalised(*a.importance) : at::Tensor();
  const float* cost = a.importance ? elements<float>(costs) : nullptr;
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

TORCH_LIBRARY_IMPL(metalmm, CPU, m) {
  hooks().cpu_strategy = [](int64_t rows, DType dtype) {
    return kStrategyNames[static_cast<int>(choose_strategy(rows, torch_dtype(dtype)))];
  };
  set_strategy_check(at::kCPU, [](std::string_view name, Activations activations) {
    strategy_by_name(name, activations);
  });
#define MM_OP(name, ...) implement<args::name>(m, Kernel<args::name, &name>::run);
#include "ops/ops.def"
}

}  // namespace metalmm::cpu
