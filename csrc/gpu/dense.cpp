#include "dense.h"

#include <algorithm>

namespace metalmm::gpu {
namespace {

// out [M, rows] = the first M rows of x panel^T, out f32 or of x's dtype.
void multiply(const at::Tensor& x, const at::Tensor& panel, at::Tensor out) {
  const bool is_wider = out.scalar_type() != x.scalar_type();
  const bool is_padded = x.size(0) != out.size(0);
  if (is_wider && x.is_cuda()) {
    at::mm_out(out, x, panel.t(), out.scalar_type());
  } else if (is_wider || is_padded || (x.is_mps() && !out.is_contiguous())) {
    // To mps, columns of a result are memory of their own that it copies back, or does not.
    out.copy_(at::mm(x, panel.t()).narrow(0, 0, out.size(0)));
  } else {
    at::mm_out(out, x, panel.t());
  }
}

// W where a row holds values of x's dtype.
at::Tensor rows_as_they_lie(const at::Tensor& w, const at::Tensor& x) {
  return w.as_strided(w.sizes(), {row_stride(w), 1}).view(x.scalar_type());
}

// Launches pass `i` alone.
void launch_pass(const Engine& e, const Plan& made, size_t i, const Buffers& buffers,
                 c10::Device device) {
  BoundPlans one(1);
  one[0].plan.passes.push_back(made.passes[i]);
  one[0].buffers = buffers;
  e.launch(one, device);
}

}  // namespace

void launch_dense(const Engine& e, const Plan& made, const Operands& o) {
  const at::Tensor &w = o[kSlotWeight], &y = o[kSlotY];
  const int64_t n = w.size(0), more = made.x_rows - o[kSlotX].size(0);
  const at::Tensor x = more ? at::constant_pad_nd(o[kSlotX], {0, 0, 0, more}) : o[kSlotX];
  const bool is_joined = made.passes.size() > static_cast<size_t>(made.panels);
  const at::Tensor products =
      made.workspace_bytes ? at::empty(y.sizes(), y.options().dtype(at::kFloat)) : y;
  if (x.size(1) == 0) {
    products.zero_();
  } else if (made.panels == 0) {
    multiply(x, rows_as_they_lie(w, x), products);
  } else {
    const at::Tensor panel = at::empty({made.panel_rows, x.size(1)}, x.options());
    for (int64_t i = 0; i < made.panels; ++i) {
      const int64_t first = i * made.panel_rows, rows = std::min(made.panel_rows, n - first);
      Buffers buffers{};
      buffers[kSlotWeight] = buffer_of(w.narrow(0, first, rows));
      buffers[kSlotY] = buffer_of(panel.narrow(0, 0, rows));
      launch_pass(e, made, static_cast<size_t>(i), buffers, y.device());
      multiply(x, panel.narrow(0, 0, rows), products.narrow(1, first, rows));
    }
  }
  if (!is_joined) return;
  Buffers buffers{};
  if (made.workspace_bytes) buffers[kSlotPartial] = buffer_of(products);
  buffers[kSlotY] = buffer_of(y);
  for (Slot slot : {kSlotBias, kSlotC}) {
    if (o[slot].defined()) buffers[slot] = buffer_of(o[slot]);
  }
  launch_pass(e, made, made.passes.size() - 1, buffers, y.device());
}

}  // namespace metalmm::gpu
