// The sizes of every op's result, for fake and meta tensors: its check runs first, so that a bad
// call fails alike wherever it is traced.
#pragma once

#include "args.h"

namespace metalmm::shapes {

#define MM_OP(name, results, arguments) \
  ShapeOf<result::results::Type>::Type name(const args::name& a);
#include "ops.def"

}  // namespace metalmm::shapes
