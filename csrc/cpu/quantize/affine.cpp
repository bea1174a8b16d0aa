// MLX affine: codes | scales | biases, w = scale * code + bias with one pair per group.

#include <cstring>

#include "formats.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kMaxGroup = 128;

struct ScaleBias {
  float scale, bias;
};

// rint(v) for any v; integers and NaN as they are.
float round_even(float v) {
  const float rounder = v < 0 ? -0x1p23f : 0x1p23f;  // no half is left from here on
  return magnitude(v) < 0x1p23f ? (v + rounder) - rounder : v;
}

// s = max((max - min) / n, 1e-7); the edge of larger |.| gets a code that decodes to it.
ScaleBias fit(const float* x, int n, float high_code) {
  const Range r = range_of(x, n);
  const float range = (r.high - r.low) / high_code;
  const float spacing = range > 1e-7f ? range : 1e-7f;
  const bool low_edge = magnitude(r.low) > magnitude(r.high);
  const float edge = low_edge ? r.low : r.high;
  const float scale = low_edge ? spacing : -spacing;
  const float zero = round_even(edge / scale);
  if (zero == 0) return {scale, 0.f};
  return {edge / zero, edge};
}

// Element i of a plane of scales or biases.
void store_as(ScaleType type, uint8_t* plane, int64_t i, float v) {
  switch (type) {
    case ScaleType::kF16:
      return store_u16(plane + 2 * i, to_half(v));
    case ScaleType::kBF16:
      return store_u16(plane + 2 * i, to_bfloat(v));
    case ScaleType::kF32:
      std::memcpy(plane + 4 * i, &v, sizeof v);
  }
}

}  // namespace

template <int kBits>
void quantize_affine(const Format& f, const float* x, int64_t k, uint8_t* out) {
  constexpr float kHigh = (1 << kBits) - 1;
  const int group = static_cast<int>(f.block_values);
  uint8_t* scales = out + f.scales_offset(k);
  uint8_t* biases = out + f.biases_offset(k);
  uint8_t q[kMaxGroup];
  for (int64_t g = 0; g < k / group; ++g, x += group, out += group * kBits / 8) {
    const ScaleBias s = fit(x, group, kHigh);
    for (int i = 0; i < group; ++i) {
      q[i] = static_cast<uint8_t>(
          static_cast<int32_t>(to_code((x[i] - s.bias) / s.scale, 0.f, kHigh)));
    }
    pack_stream<kBits>(q, group, out);
    store_as(f.scale_type, scales, g, s.scale);
    store_as(f.scale_type, biases, g, s.bias);
  }
  const int64_t used = f.biases_offset(k) + k / group * scale_bytes(f.scale_type);
  std::memset(scales - f.scales_offset(k) + used, 0, f.row_bytes(k) - used);
}

#define MM_AFFINE(name, Struct, bits, ...) \
  template void quantize_affine<bits>(const Format&, const float*, int64_t, uint8_t*);
#include "metal/formats.def"

}  // namespace metalmm::cpu::quant
