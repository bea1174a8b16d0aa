// Division of sizes, rounded up. No torch: every engine includes this.
#pragma once

#include <cstdint>

namespace metalmm {

// The number of ranges of `size` that cover n, which is not negative.
constexpr int64_t ceil_div(int64_t n, int64_t size) { return n / size + (n % size != 0); }

// The least multiple that is not below n, which is not negative.
constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

}  // namespace metalmm
