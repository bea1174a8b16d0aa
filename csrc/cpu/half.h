// f16 to f32 by integer arithmetic: for machines without an instruction, and for half_table.
#pragma once

#include <cstdint>
#include <cstring>

namespace metalmm::cpu {

// Exact, subnormals included; a NaN keeps its payload (the instructions also quiet it). Static:
// each translation unit is compiled for one instruction set, and the linker must not share its
// code.
static inline __attribute__((always_inline)) float half_bits_to_float(uint32_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude < 0x400u) {
    const float v = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -v : v;
  }
  const uint32_t exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t bits = sign | ((magnitude << 13) + exponent);
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

}  // namespace metalmm::cpu
