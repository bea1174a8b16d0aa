// Limits of the products that torch's matmul is given on MPS. They hold on every device, where they
// cost nothing, so that the same products run everywhere.
#pragma once

#include <cstdint>

namespace metalmm {

// Products of an inner dimension from 32767 on are wrong on M1 and M2: of matrices before torch
// 2.14 (pytorch issue 193487), of batches also later (195163).
constexpr int64_t kMostInner = 32766;

// MPS compiles a graph for each (M, K, N): rows of x come in multiples of so many, so that prompts
// of like length share one.
constexpr int64_t kRowsOfGraph = 64;

}  // namespace metalmm
