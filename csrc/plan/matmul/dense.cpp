// linear by torch's own matmul: which rows of W are decoded at a time, and what is done with the
// products.
#include <algorithm>

#include "plan/matmul/torch.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

// Panels are of so many rows, or of a multiple, so that each begins as W does: where 16 divides the
// address of the first row it divides that of row 16 i, whatever the stride.
constexpr int64_t kRowsMultiple = 16;

// Bytes that rows of W decoded for torch may take at a time: a matrix of 14336 rows of 4096 halves,
// so that one matmul has all of it. Small beside the model: a panel is what torch needs beyond the
// packed rows, once per stream, not once per layer. GPU ms of a prompt of 512 of 8 B parameters on
// an H100 by MB of a panel: 8 29.1, 16 24.1, 32 20.9, 64 20.9, 128 20.0, 256 (gate and up as
// one) 19.3; what a panel that stays in a cache saves is less than what matmuls of few rows of W
// lose.
constexpr int64_t kPanelBytes = int64_t{128} << 20;

// Panels of like size: a short last one would leave the machine idle.
int64_t rows_of_panel(const Problem& p) {
  const int64_t row_bytes = product(p.k, dtype_bytes(p.dtype));
  const int64_t most =
      std::max(kPanelBytes / row_bytes / kRowsMultiple, int64_t{1}) * kRowsMultiple;
  if (p.n <= most) return p.n;
  return ceil_div(ceil_div(p.n, ceil_div(p.n, most)), kRowsMultiple) * kRowsMultiple;
}

Pass decode_pass(const Problem& p, int64_t rows) {
  Problem panel;
  panel.op = Op::kDequantize;
  panel.n = rows;
  panel.k = p.k;
  panel.format = p.format;
  panel.dtype = p.dtype;
  panel.w_stride = p.w_stride;
  panel.w_alignment = p.w_alignment;
  return main_pass(StrategyId::dequantize, panel, {1, p.k}, false);
}

struct DenseFrom {
  Accelerator accelerator;
  DType dtype;
  int64_t packed_m, readable_m;
};

constexpr DenseFrom kDenseFrom[] = {
#define MM_DENSE_FROM(accelerator, dtype, packed_m, readable_m) \
  {Accelerator::accelerator, DType::dtype, packed_m, readable_m},
#include "plan/tuning.def"
};

// Whether torch multiplies rows of K values rightly on this GPU.
bool takes_inner(const Problem& p, const Gpu& gpu) {
  return gpu.accelerator == Accelerator::kTensorCores || p.k <= kMostInner;
}

}  // namespace

bool is_readable(const Problem& p) {
  return p.format->layout == Layout::kDense && p.format->name == to_string(p.dtype);
}

bool dense_pays(const Problem& p, const Gpu& gpu, Reason why) {
  if (p.op != Op::kLinear || p.has_norm || !takes_inner(p, gpu)) return false;
  for (const DenseFrom& d : kDenseFrom) {
    const int64_t least = is_readable(p) ? d.readable_m : d.packed_m;
    if (d.accelerator != gpu.accelerator || d.dtype != p.dtype || p.m < least) continue;
    why.add("M = ", p.m, " is at least ", least, ", and torch's matmul reaches ",
            d.accelerator == Accelerator::kNeural ? "the neural accelerators"
                                                  : "the tensor cores at full rate");
    return true;
  }
  return false;
}

Plan plan_dense(const Problem& p, const Gpu& gpu, Reason reason) {
  if (!takes_inner(p, gpu)) {
    reject("strategy: dense multiplies K = ", p.k,
           " by torch's matmul, which is right on Apple GPUs up to ", kMostInner);
  }
  Plan out;
  out.panel_rows = p.n;
  out.x_rows = p.m;
  if (gpu.accelerator != Accelerator::kTensorCores) {
    out.x_rows = product(ceil_div(p.m, kRowsOfGraph), kRowsOfGraph);
  }
  if (p.k > 0 && !is_readable(p)) {
    out.panel_rows = rows_of_panel(p);
    for (int64_t n = 0; n < p.n; n += out.panel_rows) {
      out.passes.push_back(decode_pass(p, std::min(out.panel_rows, p.n - n)));
    }
    out.panels = static_cast<int64_t>(out.passes.size());
  }
  if (out.panels) {
    reason.add("; W is decoded in panels of ", out.panel_rows, " rows, ", out.panels, " in all");
  } else {
    reason.add("; W is multiplied as it lies");
  }
  if (p.has_bias || p.alpha != 1 || p.softcap != 0 || (p.has_c && p.beta != 0)) {
    // Only CUDA's matmul leaves f32 sums of halves, which a result of halves has no room for.
    const bool is_apart = gpu.accelerator == Accelerator::kTensorCores && p.dtype != DType::kF32;
    if (is_apart) {
      out.workspace_bytes = static_cast<size_t>(product(product(p.m, p.n), sizeof(float)));
    }
    out.passes.push_back(reduce_pass(p, {is_apart, p.k}));
  }
  return out;
}

}  // namespace metalmm
