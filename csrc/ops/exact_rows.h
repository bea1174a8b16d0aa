// Whether the ops of this thread give each of a few rows of x, or queries, the bits that it has
// alone: asked for around a step that verifies drafted tokens.
#pragma once

#include <cstdint>

namespace metalmm {

// Up to so many rows; more are computed as without. metal/geometry.h: rows of a pass of
// gemv_batched.
constexpr int64_t kMostExactRows = 8;

bool exact_rows();
// Whether so many rows are computed as single ones.
inline bool are_exact(int64_t rows) { return rows <= kMostExactRows && exact_rows(); }
// As how many rows such a number of them is, where one decides how a product is computed.
inline int64_t counted_rows(int64_t rows) { return rows > 1 && are_exact(rows) ? 1 : rows; }

}  // namespace metalmm
