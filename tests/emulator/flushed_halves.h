// Included before a shader that is compiled without conversions of the processor's own: halves
// below 2^-14 become zeros of their sign where they become floats, as on a GPU that drops them.
#pragma once

extern "C" __attribute__((used, visibility("hidden"), weak)) float __extendhfsf2(_Float16 h) {
  const unsigned bits = __builtin_bit_cast(unsigned short, h), sign = bits >> 15 << 31;
  const unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) return __builtin_bit_cast(float, sign);
  const unsigned wide = exponent == 31 ? 255 : exponent + 112;
  return __builtin_bit_cast(float, sign | wide << 23 | mantissa << 13);
}
