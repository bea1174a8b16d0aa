// Attention and the quantizers of a cache, of torch's own ops: on any device, without a copy to the
// host.
#pragma once

#include "ops/checks.h"

namespace metalmm::composed {

// The op of keys and values [B, kv_heads, T, D] of any float dtype in the place of its own; in f32,
// rounded once, differentiable.
at::Tensor attention(const args::attention& a, const at::Tensor& keys, const at::Tensor& values);

// The slots of t that queries whose own slots are `own` see: int64 tensors, and bools of their
// common shape.
at::Tensor visible(const at::Tensor& t, const at::Tensor& own, int64_t window, bool causal);

// x f32 [N, K] -> the rows of the format, uint8 [N, row_bytes(K)], with the bytes of quantize; a
// tensor that is not defined where no composition is written. A block with NaN or Inf decodes to no
// finite number.
at::Tensor quantize(const at::Tensor& x, const Format& format);

}  // namespace metalmm::composed
