// The ops on CPU tensors, each as its row of ops/ops.def. Everything between two ops stays f32; the
// result is rounded once, to its dtype.
#pragma once

#include "ops/args.h"

namespace metalmm::cpu {

#define MM_OP(name, results, arguments) result::results::Type name(const args::name& a);
#include "ops/ops.def"

}  // namespace metalmm::cpu
