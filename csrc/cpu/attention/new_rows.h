// Rows that a cache is given.
#pragma once

#include "ops/attention/checks.h"

namespace metalmm::cpu {

struct Cache {
  const at::Tensor &keys, &values;
  const CacheShape& shape;
};

// k and v [B, kv_heads, S, D] quantized into `slots`, which are checked. ValueError where a value
// that a format packs is NaN or infinite: nothing is written then.
void append_rows(const Cache& cache, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& slots);

}  // namespace metalmm::cpu
