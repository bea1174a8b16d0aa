// The schemas of torch.ops.metalmm. Each engine registers its kernels for its own dispatch key.
#include <torch/library.h>

TORCH_LIBRARY(metalmm, m) {
#define MM_OP(name, arguments, results) m.def(#name "(" arguments ") -> " results);
#include "ops.def"
}
