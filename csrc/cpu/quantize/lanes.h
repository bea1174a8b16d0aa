// Eight f32 side by side: one lane per group of values, or per trial of a search.
//
// Compiler vectors, so that the same text is SSE2 and NEON; two of four lanes each, because the
// searches are chains of dependent additions, on which one vector at a time would wait.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "math.h"

namespace metalmm::cpu::quant {

constexpr int kLanes = 8;

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct Mask {
  Int4 lo, hi;
};
struct Lanes {
  Float4 lo, hi;
};

inline Float4 set4(float v) { return Float4{v, v, v, v}; }
inline Lanes set1(float v) { return {set4(v), set4(v)}; }
inline Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

inline Lanes operator+(Lanes a, Lanes b) { return {a.lo + b.lo, a.hi + b.hi}; }
inline Lanes operator-(Lanes a, Lanes b) { return {a.lo - b.lo, a.hi - b.hi}; }
inline Lanes operator*(Lanes a, Lanes b) { return {a.lo * b.lo, a.hi * b.hi}; }
inline Lanes operator/(Lanes a, Lanes b) { return {a.lo / b.lo, a.hi / b.hi}; }
inline Lanes operator-(Lanes a) { return {-a.lo, -a.hi}; }
inline Lanes& operator+=(Lanes& a, Lanes b) { return a = a + b; }

// Comparisons are false for NaN, but != is true.
inline Mask operator<(Lanes a, Lanes b) { return {a.lo < b.lo, a.hi < b.hi}; }
inline Mask operator>(Lanes a, Lanes b) { return {a.lo > b.lo, a.hi > b.hi}; }
inline Mask operator!=(Lanes a, Lanes b) { return {a.lo != b.lo, a.hi != b.hi}; }
inline Mask operator&(Mask a, Mask b) { return {a.lo & b.lo, a.hi & b.hi}; }
inline Mask operator~(Mask a) { return {~a.lo, ~a.hi}; }

inline bool any(Mask m) {
  int64_t halves[2];
  const Int4 both = m.lo | m.hi;
  std::memcpy(halves, &both, sizeof both);
  return (halves[0] | halves[1]) != 0;
}

inline Float4 select4(Int4 mask, Float4 a, Float4 b) {
  return reinterpret_cast<Float4>((mask & reinterpret_cast<Int4>(a)) |
                                  (~mask & reinterpret_cast<Int4>(b)));
}
// mask ? a : b
inline Lanes select(Mask mask, Lanes a, Lanes b) {
  return {select4(mask.lo, a.lo, b.lo), select4(mask.hi, a.hi, b.hi)};
}
// mask ? a : 0
inline Lanes only(Mask mask, Lanes a) {
  return {reinterpret_cast<Float4>(mask.lo & reinterpret_cast<Int4>(a.lo)),
          reinterpret_cast<Float4>(mask.hi & reinterpret_cast<Int4>(a.hi))};
}

inline Lanes abs(Lanes a) {
  const Int4 bits = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
  return {reinterpret_cast<Float4>(reinterpret_cast<Int4>(a.lo) & bits),
          reinterpret_cast<Float4>(reinterpret_cast<Int4>(a.hi) & bits)};
}

// a > b ? a : b, and a < b ? a : b: b where a is NaN, and where both are zeros.
#if defined(__SSE2__)
inline Lanes max(Lanes a, Lanes b) { return {_mm_max_ps(a.lo, b.lo), _mm_max_ps(a.hi, b.hi)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm_min_ps(a.lo, b.lo), _mm_min_ps(a.hi, b.hi)}; }
#else
inline Lanes max(Lanes a, Lanes b) { return select(a > b, a, b); }
inline Lanes min(Lanes a, Lanes b) { return select(a < b, a, b); }
#endif

struct Range {
  float low, high;
};
// The least and the largest of n values, a multiple of kLanes.
inline Range range_of(const float* x, int n) {
  Lanes low = load(x), high = low;
  for (int i = kLanes; i < n; i += kLanes) {
    low = min(load(x + i), low);
    high = max(load(x + i), high);
  }
  float lows[kLanes], highs[kLanes];
  store(lows, low);
  store(highs, high);
  Range r{lows[0], highs[0]};
  for (int i = 1; i < kLanes; ++i) {
    r.low = lows[i] < r.low ? lows[i] : r.low;
    r.high = highs[i] > r.high ? highs[i] : r.high;
  }
  return r;
}

// The largest |x| of a range.
inline float max_abs(Range r) { return magnitude(r.high > -r.low ? r.high : r.low); }

// rint(v) clamped to [low, high]; NaN to low. As the scalar of this name.
inline Lanes to_code(Lanes v, Lanes low, Lanes high) {
  const Lanes rounder = set1(kRounder);
  return min(max((v + rounder) - rounder, low), high);
}

}  // namespace metalmm::cpu::quant
