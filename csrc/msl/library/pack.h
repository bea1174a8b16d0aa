// <metal_pack>: normalized integers in one word, from and to floats.
#pragma once

#include "math.h"

namespace metal {

namespace emulator {

// A value of b bits: [0, 1] as 0 ... 2^b - 1, or [-1, 1] as up to 2^(b-1) - 1 either way: `top`.
template <class V>
METAL_FUNC V from_unorm(V x, V top) {
  return x / top;
}
template <class V>
METAL_FUNC V from_snorm(V x, V top) {
  return max(x / top, V(-1));
}
template <class V>
METAL_FUNC V to_unorm(V x, V top) {
  return rint(saturate(x) * top);
}
template <class V>
METAL_FUNC V to_snorm(V x, V top) {
  return rint(clamp(x, V(-1), V(1)) * top);
}
// sRGB's curve on the three colours, not on alpha.
METAL_FUNC float4 srgb_to_linear(float4 c) {
  for (int i = 0; i < 3; ++i) {
    c[i] = c[i] <= 0.04045f ? c[i] / 12.92f : powr((c[i] + 0.055f) / 1.055f, 2.4f);
  }
  return c;
}
METAL_FUNC float4 linear_to_srgb(float4 c) {
  for (int i = 0; i < 3; ++i) {
    c[i] = c[i] <= 0.0031308f ? c[i] * 12.92f : 1.055f * powr(c[i], 1.0f / 2.4f) - 0.055f;
  }
  return c;
}

}  // namespace emulator

#define MM_PACK(layout, word, T, n, rule, top)                                           \
  METAL_FUNC float##n unpack_##layout##_to_float(word x) {                               \
    return emulator::from_##rule(convert_to<float##n>(as_type<T##n>(x)), float##n(top)); \
  }                                                                                      \
  METAL_FUNC half##n unpack_##layout##_to_half(word x) {                                 \
    return convert_to<half##n>(unpack_##layout##_to_float(x));                           \
  }                                                                                      \
  METAL_FUNC word pack_float_to_##layout(float##n x) {                                   \
    return as_type<word>(convert_to<T##n>(emulator::to_##rule(x, float##n(top))));       \
  }                                                                                      \
  METAL_FUNC word pack_half_to_##layout(half##n x) {                                     \
    return pack_float_to_##layout(convert_to<float##n>(x));                              \
  }
MM_PACK(unorm4x8, uint, uchar, 4, unorm, 255.0f)
MM_PACK(snorm4x8, uint, char, 4, snorm, 127.0f)
MM_PACK(unorm2x16, uint, ushort, 2, unorm, 65535.0f)
MM_PACK(snorm2x16, uint, short, 2, snorm, 32767.0f)
#undef MM_PACK

METAL_FUNC float4 unpack_unorm10a2_to_float(uint x) {
  const float4 fields =
      convert_to<float4>(uint4{x & 1023, x >> 10 & 1023, x >> 20 & 1023, x >> 30});
  return fields / float4{1023.0f, 1023.0f, 1023.0f, 3.0f};
}
METAL_FUNC half4 unpack_unorm10a2_to_half(uint x) {
  return convert_to<half4>(unpack_unorm10a2_to_float(x));
}
METAL_FUNC uint pack_float_to_unorm10a2(float4 x) {
  const uint4 u = convert_to<uint4>(emulator::to_unorm(x, float4{1023.0f, 1023.0f, 1023.0f, 3.0f}));
  return u.x | u.y << 10 | u.z << 20 | u.w << 30;
}
METAL_FUNC uint pack_half_to_unorm10a2(half4 x) {
  return pack_float_to_unorm10a2(convert_to<float4>(x));
}
METAL_FUNC float4 unpack_unorm4x8_srgb_to_float(uint x) {
  return emulator::srgb_to_linear(unpack_unorm4x8_to_float(x));
}
METAL_FUNC half4 unpack_unorm4x8_srgb_to_half(uint x) {
  return convert_to<half4>(unpack_unorm4x8_srgb_to_float(x));
}
METAL_FUNC uint pack_float_to_srgb_unorm4x8(float4 x) {
  return pack_float_to_unorm4x8(emulator::linear_to_srgb(x));
}
METAL_FUNC uint pack_half_to_srgb_unorm4x8(half4 x) {
  return pack_float_to_srgb_unorm4x8(convert_to<float4>(x));
}

}  // namespace metal
