// The searches of the scale of a group: eight groups at a time, one per lane.
//
// x[i] holds element i of eight groups, so a sum over i adds the elements of each group in index
// order. The rules are those of torch_metalmm/formats/_search.py, operation by operation.
#pragma once

#include "lanes.h"
#include "math.h"

namespace metalmm::cpu::quant {

// x[group * n + i] of kLanes groups -> lanes[i].
template <int kN>
inline void elements_first(const float* x, Lanes* lanes) {
  for (int i = 0; i < kN; ++i) {
    float v[kLanes];
    for (int g = 0; g < kLanes; ++g) v[g] = x[g * kN + i];
    lanes[i] = load(v);
  }
}

// The element of largest |x|, sign kept, the first one of equals; +0 if all are 0.
inline Lanes signed_max(const Lanes* x, int n) {
  Lanes best = set1(0.f), best_abs = best;
  for (int i = 0; i < n; ++i) {
    const Lanes size = abs(x[i]);
    const Mask larger = size > best_abs;
    best = select(larger, x[i], best);
    best_abs = max(size, best_abs);
  }
  return best;
}

// x ~ scale * q - offset. The codes of the search are q = clamp(rint(inv * (x - low)), 0, high).
struct AsymmetricFit {
  Lanes scale, offset, inv, low;
};

// sum w * |e| or sum w * e^2 with e = (scale * q + low) - x.
template <int kN, bool kAbsolute>
inline Lanes fit_error(const Lanes* x, const Lanes* w, const Lanes* q, Lanes scale, Lanes low) {
  Lanes sum = set1(0.f);
  for (int i = 0; i < kN; ++i) {
    const Lanes e = scale * q[i] + low - x[i];
    sum += w[i] * (kAbsolute ? abs(e) : e * e);
  }
  return sum;
}

// Weighted least squares for the codes of each trial. A better low end that a trial finds
// is the one that the next trial starts from.
template <int kN, int kHigh, int kLastTrial, bool kAbsolute>
inline AsymmetricFit search_asymmetric(const Lanes* x, const Lanes* w, float start,
                                       float increment) {
  const Lanes zero = set1(0.f), top_code = set1(kHigh);
  Lanes low = x[0], high = x[0], sum_w = zero, sum_x = zero, q[kN];
  for (int i = 0; i < kN; ++i) {
    low = min(x[i], low);
    high = max(x[i], high);
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  low = select(low > zero, zero, low);
  const Mask varies = high != low;
  AsymmetricFit best;
  best.inv = top_code / (high - low);
  best.low = low;
  best.scale = set1(1.f) / best.inv;
  for (int i = 0; i < kN; ++i) q[i] = to_code(best.inv * (x[i] - low), zero, top_code);
  Lanes best_error = fit_error<kN, kAbsolute>(x, w, q, best.scale, low);
  for (int s = 0; s <= kLastTrial; ++s) {
    const Lanes inv = set1(start + increment * static_cast<float>(s) + kHigh) / (high - low);
    Lanes s1 = zero, s2 = zero, sx = zero;
    for (int i = 0; i < kN; ++i) {
      q[i] = to_code(inv * (x[i] - low), zero, top_code);
      const Lanes wq = w[i] * q[i];
      s1 += wq;
      s2 += wq * q[i];
      sx += wq * x[i];
    }
    const Lanes det = sum_w * s2 - s1 * s1;
    const Lanes new_low = (s2 * sum_x - s1 * sx) / det;
    const Mask positive = new_low > zero;
    const Lanes scale = select(positive, sx / s2, (sum_w * sx - sum_x * s1) / det);
    const Lanes clamped_low = only(~positive, new_low);
    const Lanes error = fit_error<kN, kAbsolute>(x, w, q, scale, clamped_low);
    const Mask better = (det > zero) & (error < best_error) & varies;
    best.scale = select(better, scale, best.scale);
    best.inv = select(better, inv, best.inv);
    best.low = select(better, low, best.low);
    best_error = select(better, error, best_error);
    low = select(better, clamped_low, low);
  }
  best.scale = only(varies, best.scale);
  best.inv = only(varies, best.inv);
  best.offset = -low;
  return best;
}

// x ~ scale * q, -high <= q < high. The codes of the search, q + high, are high + rint(inv * x)
// kept within 0 .. 2 * high - 1, and 0 where not `filled`.
struct SymmetricFit {
  Lanes scale, inv;
  Mask filled;
};

template <int kN, int kHigh>
inline SymmetricFit search_symmetric(const Lanes* x, const Lanes* w) {
  const Lanes zero = set1(0.f), low_code = set1(-kHigh), high_code = set1(kHigh - 1);
  const Lanes top = signed_max(x, kN);
  Lanes wx[kN];
  for (int i = 0; i < kN; ++i) wx[i] = w[i] * x[i];
  SymmetricFit best;
  Lanes best_gain = zero;
  for (int trial = 0; trial < 19; ++trial) {
    const int s = trial == 0 ? 0 : trial < 10 ? trial - 10 : trial - 9;
    const Lanes inv = set1(-(kHigh + 0.1f * static_cast<float>(s))) / top;
    Lanes a = zero, b = zero;
    for (int i = 0; i < kN; ++i) {
      const Lanes q = to_code(inv * x[i], low_code, high_code);
      a += wx[i] * q;
      b += w[i] * q * q;
    }
    const Lanes scale = a / b;
    if (trial == 0) {
      best.inv = inv;
      best.scale = only(b != zero, scale);
      best_gain = best.scale * a;
      continue;
    }
    const Mask better = (b > zero) & (a * a > best_gain * b);
    best.inv = select(better, inv, best.inv);
    best.scale = select(better, scale, best.scale);
    best_gain = select(better, scale * a, best_gain);
  }
  best.filled = ~(abs(top) < set1(kTiny));
  best.scale = only(best.filled, best.scale);
  return best;
}

// x^2, the weight of a value where no importance is given.
template <int kN>
inline void squares(const Lanes* x, Lanes* w) {
  for (int i = 0; i < kN; ++i) w[i] = x[i] * x[i];
}

// A = sum (w * x) * q and B = sum (w * q) * q.
struct DescentSums {
  Lanes a, b;
};

// Coordinate descent for x ~ scale * codes: in up to five passes each value in turn takes the code
// that fits best given the others. A pass that changes nothing is the last one.
template <int kN>
inline DescentSums descend(const Lanes* x, const Lanes* w, Lanes* codes, Lanes low_code,
                           Lanes high_code) {
  const Lanes zero = set1(0.f);
  Lanes wx[kN], sum_a = zero, sum_b = zero;
  for (int i = 0; i < kN; ++i) {
    wx[i] = w[i] * x[i];
    sum_a += wx[i] * codes[i];
    sum_b += w[i] * codes[i] * codes[i];
  }
  bool changed = true;
  for (int pass = 0; pass < 5 && changed; ++pass) {
    changed = false;
    for (int i = 0; i < kN; ++i) {
      const Lanes old = codes[i];
      const Lanes a = sum_a - wx[i] * old;
      const Lanes b = sum_b - w[i] * old * old;
      const Lanes code = to_code(x[i] * b / a, low_code, high_code);
      const Lanes new_a = a + wx[i] * code;
      const Lanes new_b = b + w[i] * code * code;
      const Mask better = (a > zero) & (code != old) & (new_b > zero) &
                          (new_a * new_a * sum_b > sum_a * sum_a * new_b);
      codes[i] = select(better, code, old);
      sum_a = select(better, new_a, sum_a);
      sum_b = select(better, new_b, sum_b);
      changed |= any(better);
    }
  }
  return {sum_a, sum_b};
}

// x ~ scale * q, -high <= q < high, weights x^2. Returns the scale; codes[i] = q + high, or 0 in an
// empty group.
template <int kN, int kHigh>
inline Lanes search_descent(const Lanes* x, Lanes* codes) {
  const Lanes low_code = set1(-kHigh), high_code = set1(kHigh - 1);
  const Lanes top = signed_max(x, kN);
  const Lanes inv = set1(-kHigh) / top;
  Lanes w[kN];
  squares<kN>(x, w);
  for (int i = 0; i < kN; ++i) codes[i] = to_code(inv * x[i], low_code, high_code);
  const DescentSums sums = descend<kN>(x, w, codes, low_code, high_code);
  const Mask filled = ~(abs(top) < set1(kTiny));
  for (int i = 0; i < kN; ++i) codes[i] = only(filled, codes[i] + set1(kHigh));
  return only(filled, sums.a / sums.b);
}

// x ~ scale * q, x >= 0, 0 <= q <= high. Returns the scale; codes[i] = q.
template <int kN, int kHigh>
inline Lanes search_positive(const Lanes* x, const Lanes* w, Lanes* codes) {
  const Lanes zero = set1(0.f), high_code = set1(kHigh);
  Lanes top = zero;
  for (int i = 0; i < kN; ++i) top = max(x[i], top);
  Lanes best = zero, best_error = zero;
  for (int trial = 0; trial < 9; ++trial) {
    const int s = trial == 0 ? 0 : trial < 5 ? trial - 5 : trial - 4;
    const Lanes inv = set1(0.1f * static_cast<float>(s) + kHigh) / top;
    const Lanes scale = set1(1.f) / inv;
    Lanes error = zero;
    for (int i = 0; i < kN; ++i) {
      const Lanes e = x[i] - scale * to_code(inv * x[i], zero, high_code);
      error += w[i] * e * e;
    }
    const Mask better = error < best_error;
    best = trial == 0 ? inv : select(better, inv, best);
    best_error = trial == 0 ? error : select(better, error, best_error);
  }
  for (int i = 0; i < kN; ++i) codes[i] = to_code(best * x[i], zero, high_code);
  const DescentSums sums = descend<kN>(x, w, codes, zero, high_code);
  const Mask filled = ~(top < set1(kTiny));
  for (int i = 0; i < kN; ++i) codes[i] = only(filled, codes[i]);
  return only(filled & (sums.b != zero), sums.a / sums.b);
}

}  // namespace metalmm::cpu::quant
