// linear by torch's own matmul.
#pragma once

#include "operands.h"

namespace metalmm::gpu {

// Executes a plan of torch's matmul (Plan::panel_rows) of linear. The product is of x's dtype: its
// sums are f32 as far as torch's settings leave them so (on CUDA TF32 of f32 and reduced-precision
// reductions of f16 and bf16 are the user's choice), and rounded once, or to f32 where something
// joins it or y is f32. Only CUDA's matmul leaves f32 sums of halves; elsewhere those are rounded
// to x's dtype first.
void launch_dense(const Engine& e, const Plan& made, const Operands& o);

}  // namespace metalmm::gpu
