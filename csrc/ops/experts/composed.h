// The parts around the products of experts, of torch's own ops: for engines without a kernel, and
// where autograd records.
#pragma once

#include "checks.h"

namespace metalmm::composed {

// gate and up, f32, as one; differentiable.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, const Gate& how);

// t [..., 2 N] as gate and up, views.
struct GateUp {
  at::Tensor gate, up;
};
GateUp halves_of(const at::Tensor& t, int64_t dim, bool interleaved);

}  // namespace metalmm::composed
