// One function per row of metal/formats.def: what quantize_row chooses from.
#pragma once

#include <cstdint>

#include "plan/format.h"

namespace metalmm::cpu::quant {

#pragma GCC visibility push(hidden)  // a row without its function fails to link, not to load

// out[0, k * bytes per value) = x[0, k) in the format's type, rounded to nearest even.
#define MM_DENSE(name, ...) void quantize_##name(const float* x, int64_t k, uint8_t* out);
// One block by the rules of the Python class of that name; a row that is only read has none.
#define MM_PACKS_0(name)
#define MM_PACKS_1(name) void quantize_##name(const float* x, uint8_t* out);
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, packs, ...) \
  MM_PACKS_##packs(name)
#include "metal/formats.def"
#undef MM_PACKS_0
#undef MM_PACKS_1

// A whole row of f: codes | scales | biases | zeros. importance: of its columns, or nullptr.
template <int kBits>
void quantize_affine(const Format& f, const float* x, int64_t k, uint8_t* out,
                     const float* importance);

#pragma GCC visibility pop

}  // namespace metalmm::cpu::quant
