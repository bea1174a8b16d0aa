// A block of 32 f32 values from stdin, quantized by QUANTIZE; to stdout its bytes, then what the
// scalar codec CODEC decodes them to.
#include <cstdio>

#include "cpu/codecs/block.h"
#include "cpu/quantize/formats.h"
#include "cpu/quantize/math.h"

namespace metalmm::cpu {
namespace {
float halves[1 << 16];
}  // namespace
const float* const half_table = halves;

template <int kVector = 0>
void decode(const MM_ISA::CODEC::Block& open, float* out) {
  MM_ISA::store(out + kVector * MM_ISA::kWidth, MM_ISA::CODEC::get<kVector>(open, 0));
  if constexpr (kVector + 1 < MM_ISA::kVectors) decode<kVector + 1>(open, out);
}
}  // namespace metalmm::cpu

int main() {
  using namespace metalmm::cpu;
  using Codec = MM_ISA::CODEC;
  for (uint32_t i = 0; i < 1 << 16; ++i) halves[i] = quant::from_half(static_cast<uint16_t>(i));
  float x[Codec::kBlockValues];
  uint8_t bytes[Codec::kBlockBytes];
  if (std::fread(x, sizeof x, 1, stdin) != 1) return 1;
  quant::QUANTIZE(x, bytes);
  Codec::Block open;
  Codec::open(Codec::row(bytes, {}), 0, open);
  decode(open, x);
  std::fwrite(bytes, sizeof bytes, 1, stdout);
  std::fwrite(x, sizeof x, 1, stdout);
  return 0;
}
