// 4-bit codes that index 16 uneven levels: iq4_nl, iq4_xs. The trials of a search run side by side.

#include "cpu/codecs/levels.h"
#include "formats.h"
#include "importance/weigh.h"
#include "lanes.h"
#include "math.h"
#include "pack.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kGroup = 32;
constexpr int kTries = 7;
constexpr int kTrials = 1 + 2 * kTries + 1;
constexpr int kLevels = sizeof kIQ4Levels / sizeof *kIQ4Levels;

constexpr float middle(int code) { return (kIQ4Levels[code] + kIQ4Levels[code + 1]) / 2; }

// The level nearest to v, the upper one of a tie, by floor(2 * v): the middles are whole halves.
// Rejected: counting the middles up to v: 45 SSE2 instructions for 4 values, 1.8 times slower.
constexpr int kReach = 2 * (127 + kTries) + 2;
struct LevelTable {
  float level[2 * kReach + 1] = {};
  constexpr LevelTable() {
    for (int t = -kReach, code = 0; t <= kReach; ++t) {
      while (code + 1 < kLevels && t >= 2 * middle(code)) ++code;
      level[t + kReach] = kIQ4Levels[code];
    }
  }
};
constexpr LevelTable kNearest;

// The level nearest to twice_v / 2, |twice_v| < kReach.
Float4 nearest_level4(Float4 twice_v) {
  const Int4 toward_zero = __builtin_convertvector(twice_v, Int4);
  const Int4 t = toward_zero + (__builtin_convertvector(toward_zero, Float4) > twice_v);
  const float* level = kNearest.level + kReach;
  return Float4{level[t[0]], level[t[1]], level[t[2]], level[t[3]]};
}

// q[i] = the code of the level nearest to inv * x[i], the upper one of a tie, 15 for NaN.
void nearest_codes(const float* x, float inv, uint8_t* q) {
  float v[kGroup];
  int32_t count[kGroup] = {};
  for (int i = 0; i < kGroup; ++i) v[i] = inv * x[i];
  for (int code = 0; code + 1 < kLevels; ++code) {
    for (int i = 0; i < kGroup; ++i) count[i] += !(v[i] < middle(code));
  }
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>(count[i]);
}

// A = sum (w * l) * x and B = sum (w * l) * l of each trial, l the level nearest to inv * x. Where
// no weights are given they are x^2.
struct Sums {
  float a[kTrials], b[kTrials];
};

Sums trial_sums(const float* x, const float* w, const float* inv) {
  Sums sums;
  for (int first = 0; first < kTrials; first += kLanes) {
    const Lanes twice = load(inv + first) + load(inv + first);
    Lanes a = set1(0.f), b = a;
    for (int i = 0; i < kGroup; ++i) {
      const Lanes value = set1(x[i]);
      const Lanes v = twice * value;
      const Lanes level = {nearest_level4(v.lo), nearest_level4(v.hi)};
      const Lanes wl = set1(w ? w[i] : x[i] * x[i]) * level;
      a += wl * value;
      b += wl * level;
    }
    store(sums.a + first, a);
    store(sums.b + first, b);
  }
  return sums;
}

// scale for x ~ scale * level of 32 values: the best of 16 trials; 0 if all are tiny.
float search_levels(const float* x, const float* w) {
  const float top = signed_max(x, kGroup);
  if (magnitude(top) < kTiny) return 0;
  float inv[kTrials];
  inv[0] = 1 / (-top / kIQ4Levels[0]);
  for (int t = -kTries; t <= kTries; ++t) inv[t + kTries + 1] = (kIQ4Levels[0] + t) / top;
  const Sums sums = trial_sums(x, w, inv);
  float scale = sums.b[0] == 0 ? 0 : sums.a[0] / sums.b[0];
  float best = scale * sums.a[0];
  for (int t = 1; t < kTrials; ++t) {
    const float a = sums.a[t], b = sums.b[t];
    if (b > 0 && a * a > best * b) {
      scale = a / b;
      best = scale * a;
    }
  }
  return scale;
}

// w: the weights of x, or nullptr.
void pack_iq4_nl(const float* x, const float* w, uint8_t* out) {
  uint8_t q[kGroup];
  const float d = search_levels(x, w);
  store_u16(out, to_half(d));
  nearest_codes(x, reciprocal(d), q);
  join_fields<4, 16>(q, kGroup, out + 2);
}

void pack_iq4_xs(const float* x, const float* w, uint8_t* out) {
  constexpr int kGroups = 8;
  float scale[kGroups];
  for (int s = 0; s < kGroups; ++s) {
    scale[s] = search_levels(x + s * kGroup, w ? w + s * kGroup : nullptr);
  }
  const float d = -signed_max(scale, kGroups) / 32;
  const float inv = reciprocal(d);
  store_u16(out, to_half(d));
  uint8_t low[kGroups], high[kGroups];
  for (int s = 0; s < kGroups; ++s) {
    const float code = to_code(inv * scale[s], -32, 31);
    const int sc = static_cast<int>(code) + 32;
    low[s] = sc & 15;
    high[s] = static_cast<uint8_t>(sc >> 4);
    uint8_t q[kGroup];
    nearest_codes(x + s * kGroup, reciprocal(d * code), q);
    join_fields<4, 16>(q, kGroup, out + 8 + 16 * s);
  }
  join_fields<2, 1>(high, kGroups, out + 2);
  join_fields<4, 1>(low, kGroups, out + 4);
}

}  // namespace

MM_WITH_WEIGHTS(iq4_nl, kGroup, 18)
MM_WITH_WEIGHTS(iq4_xs, 256, 136)

}  // namespace metalmm::cpu::quant
