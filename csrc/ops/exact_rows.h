// Whether the ops of this thread give each of a few rows of x, or queries, the bits that it has
// alone: asked for around a step that verifies drafted tokens.
#pragma once

#include <cstdint>

#include "metal/geometry.h"

namespace metalmm {

bool exact_rows();
// Whether so many rows are computed as single ones: several, up to those that one pass takes.
inline bool are_exact(int64_t rows) { return rows > 1 && rows <= kBatchPerPass && exact_rows(); }

}  // namespace metalmm
