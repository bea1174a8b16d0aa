#pragma once

#include "ops/args.h"

namespace metalmm::gradients {

// In place of torch's fallback for negated and conjugate views, which takes the first result of an
// op for granted: such k and v are computed, such caches refused.
void cache_append_of_views(const args::cache_append& a);

}  // namespace metalmm::gradients
