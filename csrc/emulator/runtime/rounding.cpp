// Conversions that clang calls: nearest, ties to even. Subnormal numbers are dropped where the
// processor drops them (float_mode.h).
#include <cstdint>
#include <cstring>

extern "C" {

static volatile const float kOne = 1.0f;

__attribute__((weak)) __bf16 __truncsfbf2(float x) {
  x *= kOne;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) {
    bits |= 0x00400000;  // NaN: quiet, and not rounded to infinity
  } else {
    bits += 0x7FFF + (bits >> 16 & 1);
  }
  auto high = static_cast<uint16_t>(bits >> 16);
  __bf16 y;
  memcpy(&y, &high, sizeof y);
  return y;
}

// To odd, which keeps what a second rounding must know.
static float rounded_to_odd(double x) {
  float y = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &y, sizeof bits);
  if (static_cast<double>(y) != x && x == x && (bits & 1) == 0) {
    bool away = (y < 0 ? -static_cast<double>(y) : static_cast<double>(y)) > (x < 0 ? -x : x);
    bits += away ? -1 : 1;
    memcpy(&y, &bits, sizeof y);
  }
  return y;
}

__attribute__((weak)) __bf16 __truncdfbf2(double x) { return __truncsfbf2(rounded_to_odd(x)); }

__attribute__((weak)) _Float16 __truncdfhf2(double x) {
  return static_cast<_Float16>(rounded_to_odd(x));
}
}
