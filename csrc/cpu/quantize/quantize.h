// Native quantizers: f32 values to packed rows, bit-equal to the specification,
// torch_metalmm/formats.
//
// Equal bits need the same arithmetic: one IEEE f32 rounding per operation, and sums that add the
// elements of a group in index order. So these files are compiled with -ffp-contract=off, without
// -ffast-math, for the baseline instruction set; SIMD runs across groups or across trials, never
// across the terms of a sum.
#pragma once

#include <cstdint>

#include "plan/format.h"

namespace metalmm::cpu {

// out[0, f.row_bytes(k)) = the packed row of x[0, k). Every byte is written.
// x is finite, k a multiple of f.block_values, and f.packs. importance[0, k), or nullptr: how much
// errors cost, as normalise_importance leaves it. Uses nothing but its arguments: any thread may
// call.
void quantize_row(const Format& f, const float* x, int64_t k, uint8_t* out,
                  const float* importance = nullptr);

// importance[0, k), finite and not negative, in place: divided by the power of two that brings its
// largest into [1, 2), and at least 2^-40; all 1 where all are 0.
void normalise_importance(float* importance, int64_t k);

}  // namespace metalmm::cpu
