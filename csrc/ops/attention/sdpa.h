// Attention by torch's scaled_dot_product_attention, on any device, without a copy to the host.
#pragma once

#include <functional>

#include "ops/checks.h"
#include "plan/plan.h"

namespace metalmm::composed {

// Rows of a cache, [B, kv_heads, capacity, row].
struct CacheRows {
  const at::Tensor& rows;
  const Format& format;
};
// Decodes some rows to values [b, h, T, D]: packed ones in the dtype of q, others as they are.
using Decode = std::function<at::Tensor(const at::Tensor&, const Format&)>;

// The call that attention_problem() describes, over its first problem.n slots; rounded to the dtype
// of q, and so are weights. Where `length`, of its own or nothing, is a tensor, slots behind it are
// hidden and what they hold is not read. Without a strategy: a tensor that is not defined where
// torch would store all scores. ValueError: the strategy has not what is asked for.
at::Tensor sdpa(const Problem& problem, const args::attention& a, const CacheRows& keys,
                const CacheRows& values, const OptionalTensor& length, const Decode& decode);

}  // namespace metalmm::composed
