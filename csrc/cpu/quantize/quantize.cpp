#include "quantize.h"

#include <vector>

#include "formats.h"
#include "importance/weigh.h"

namespace metalmm::cpu {
namespace {

template <int kValues, int kBytes, void kBlock(const float*, uint8_t*)>
void quantize_blocks(const float* x, int64_t k, uint8_t* out) {
  for (int64_t b = 0; b < k / kValues; ++b) kBlock(x + b * kValues, out + b * kBytes);
}

enum Mean { OverRow, OverBlock };

// Whether the format's quantizer weighs errors, and then the row.
bool quantize_weighted(const Format& f, const float* x, const float* importance, int64_t k,
                       uint8_t* out) {
  std::vector<float> w(k);
  switch (f.codec) {
#define MM_WEIGHTED(name, Struct, values, spread, mean)                             \
  case Codec::Struct:                                                               \
    quant::weigh(x, importance, k, mean == OverRow ? k : values, spread, w.data()); \
    quant::weighted_##name(x, w.data(), k / values, out);                           \
    return true;
#include "importance/weighted.def"
    default:
      return false;
  }
}

}  // namespace

void quantize_row(const Format& f, const float* x, int64_t k, uint8_t* out,
                  const float* importance) {
  if (importance && quantize_weighted(f, x, importance, k, out)) return;
  switch (f.codec) {
#define MM_DENSE(name, Struct, ...) \
  case Codec::Struct:               \
    return quant::quantize_##name(x, k, out);
#define MM_PACKS_0(...) break;  // f.packs is false: refused before
#define MM_PACKS_1(name, values, bytes) \
  return quantize_blocks<values, bytes, quant::quantize_##name>(x, k, out);
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, packs, ...) \
  case Codec::Struct:                                                                    \
    MM_PACKS_##packs(name, values, bytes)
#define MM_AFFINE(name, Struct, bits, ...) \
  case Codec::Struct:                      \
    return quant::quantize_affine<bits>(f, x, k, out, importance);
#include "metal/formats.def"
    case Codec::kCount:
      break;
  }
}

}  // namespace metalmm::cpu
