// Affine rows as integer codes. The contract is in codes.h; a block is one chunk.
#pragma once

#include "codes.h"
#include "cpu/codecs/plane.h"

namespace metalmm::cpu::MM_ISA {

template <int kBits>
struct Integers<Affine<kBits>> {
  static constexpr int8::Kind kKind{kChunkValues, true, kBits == 8, 0};
  struct Block {
    float d, m;
    const uint8_t* codes;
  };
  static MM_INLINE float parameter(const uint8_t* plane, int64_t group, DType type) {
    if (type == DType::kF16) return half_value(plane + 2 * group);
    if (type == DType::kBF16) return bf16_to_float(plane + 2 * group);
    return load_as<float>(plane + 4 * group);
  }
  static MM_INLINE void open(const typename Affine<kBits>::Row& row, int64_t chunk, Block& k) {
    k.codes = row.codes + chunk * Affine<kBits>::kBlockBytes;
    const int64_t group = chunk >> row.group_shift;
    if (group << row.group_shift != chunk) return;
    k.d = parameter(row.scales, group, row.type);
    k.m = parameter(row.biases, group, row.type);
  }
  static MM_INLINE const float* scales(const Block& k) { return &k.d; }
  static MM_INLINE const float* mins(const Block& k) { return &k.m; }
  static MM_INLINE Bytes codes(const Block& k, int) { return stream_bytes<kBits>(k.codes); }
};

}  // namespace metalmm::cpu::MM_ISA
