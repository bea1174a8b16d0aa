// linear by torch's own matmul.
#pragma once

#include "operands.h"

namespace metalmm::gpu {

// Executes a plan of torch's matmul (Plan::panel_rows) of linear. The product is of x's dtype: its
// sums are f32 as far as torch's settings leave them so (on CUDA TF32 of f32 and reduced-precision
// reductions of f16 and bf16 are the user's choice), and rounded once; where something joins it,
// once before and once after, except on CUDA, whose matmul leaves f32 sums of halves.
void launch_dense(const Engine& e, const Plan& made, const Operands& o);

}  // namespace metalmm::gpu
