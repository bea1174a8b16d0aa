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
void store_as(DType type, uint8_t* plane, int64_t i, float v) {
  if (type == DType::kF16) return store_u16(plane + 2 * i, to_half(v));
  if (type == DType::kBF16) return store_u16(plane + 2 * i, to_bfloat(v));
  std::memcpy(plane + 4 * i, &v, sizeof v);
}

// v as it will be decoded.
float rounded_to(DType type, float v) {
  if (type == DType::kF32 || !(v == v)) return v;
  return type == DType::kF16 ? from_half(to_half(v))
                             : bits_float(static_cast<uint32_t>(to_bfloat(v)) << 16);
}

Lanes rounded_to(DType type, Lanes v) {
  float each[kLanes];
  store(each, v);
  for (float& one : each) one = rounded_to(type, one);
  return load(each);
}

// Scale, bias and codes of eight groups, one per lane.
struct Eight {
  Lanes scale, bias, q[kMaxGroup];
};

// sum w * e * e, e = (scale * q + bias) - x.
Lanes fit_error(const Lanes* x, const Lanes* w, int n, const Eight& fit) {
  Lanes sum = set1(0.f);
  for (int i = 0; i < n; ++i) {
    const Lanes e = fit.scale * fit.q[i] + fit.bias - x[i];
    sum += w[i] * e * e;
  }
  return sum;
}

// The weighted least squares for the codes of a trial, and the codes for these, where the mask is.
Mask trial(const Lanes* x, const Lanes* w, int n, Lanes low, Lanes inv, float high_code, DType type,
           Eight& fit) {
  const Lanes zero = set1(0.f), high = set1(high_code);
  Lanes sum_w = zero, sum_x = zero, s1 = zero, s2 = zero, sx = zero;
  for (int i = 0; i < n; ++i) {
    const Lanes q = to_code(inv * (x[i] - low), zero, high);
    const Lanes wq = w[i] * q;
    sum_w += w[i];
    sum_x += w[i] * x[i];
    s1 += wq;
    s2 += wq * q;
    sx += wq * x[i];
  }
  const Lanes det = sum_w * s2 - s1 * s1;
  fit.scale = rounded_to(type, (sum_w * sx - sum_x * s1) / det);
  fit.bias = rounded_to(type, (s2 * sum_x - s1 * sx) / det);
  for (int i = 0; i < n; ++i) fit.q[i] = to_code((x[i] - fit.bias) / fit.scale, zero, high);
  return det > zero;
}

// Replaces `best` where one of 33 trials has a smaller error.
void search(const Lanes* x, const Lanes* w, int n, float high_code, DType type, Eight& best) {
  Lanes low = x[0], high = x[0];
  for (int i = 0; i < n; ++i) {
    low = min(x[i], low);
    high = max(x[i], high);
  }
  Lanes best_error = fit_error(x, w, n, best);
  for (int t = 0; t < 33; ++t) {
    const Lanes inv = set1(static_cast<float>(t) / 8 - 1 + high_code) / (high - low);
    Eight fit;
    const Mask solved = trial(x, w, n, low, inv, high_code, type, fit);
    const Lanes error = fit_error(x, w, n, fit);
    const Mask better = solved & (error < best_error);
    if (!any(better)) continue;
    best.scale = select(better, fit.scale, best.scale);
    best.bias = select(better, fit.bias, best.bias);
    best_error = select(better, error, best_error);
    for (int i = 0; i < n; ++i) best.q[i] = select(better, fit.q[i], best.q[i]);
  }
}

// A row's planes, to which groups are written in turn.
template <int kBits>
struct Writer {
  static constexpr float kHigh = (1 << kBits) - 1;
  DType type;
  int group;
  uint8_t *codes, *scales, *biases;

  void put(int64_t g, const uint8_t* q, ScaleBias s) const {
    pack_stream<kBits>(q, group, codes + g * group * kBits / 8);
    store_as(type, scales, g, s.scale);
    store_as(type, biases, g, s.bias);
  }

  void round(const float* x, int64_t groups) const {
    uint8_t q[kMaxGroup];
    for (int64_t g = 0; g < groups; ++g, x += group) {
      const ScaleBias s = fit(x, group, kHigh);
      for (int i = 0; i < group; ++i) {
        q[i] = code_byte(to_code((x[i] - s.bias) / s.scale, 0.f, kHigh));
      }
      put(g, q, s);
    }
  }

  // Groups [g, g + count), count <= kLanes; the other lanes repeat the last group.
  void search_eight(const float* x, const float* importance, int64_t g, int count) const {
    Lanes xs[kMaxGroup], w[kMaxGroup];
    Eight best;
    float scale[kLanes], bias[kLanes], v[kLanes], weight[kLanes], q[kLanes];
    const float* from[kLanes];
    ScaleBias s[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      from[l] = x + (g + (l < count ? l : count - 1)) * group;
      s[l] = fit(from[l], group, kHigh);
      scale[l] = rounded_to(type, s[l].scale);
      bias[l] = rounded_to(type, s[l].bias);
    }
    for (int i = 0; i < group; ++i) {
      for (int l = 0; l < kLanes; ++l) {
        v[l] = from[l][i];
        weight[l] = importance[from[l] - x + i];
        q[l] = to_code((v[l] - s[l].bias) / s[l].scale, 0.f, kHigh);
      }
      xs[i] = load(v);
      w[i] = load(weight);
      best.q[i] = load(q);
    }
    best.scale = load(scale);
    best.bias = load(bias);
    search(xs, w, group, kHigh, type, best);
    store(scale, best.scale);
    store(bias, best.bias);
    uint8_t codes_of[kLanes][kMaxGroup];
    for (int i = 0; i < group; ++i) {
      store(q, best.q[i]);
      for (int l = 0; l < kLanes; ++l) {
        codes_of[l][i] = code_byte(q[l]);
      }
    }
    for (int l = 0; l < count; ++l) put(g + l, codes_of[l], {scale[l], bias[l]});
  }
};

}  // namespace

template <int kBits>
void quantize_affine(const Format& f, const float* x, int64_t k, uint8_t* out,
                     const float* importance) {
  const int group = static_cast<int>(f.block_values);
  uint8_t* scales = out + f.scales_offset(k);
  const Writer<kBits> to{f.scale_type, group, out, scales, out + f.biases_offset(k)};
  const int64_t groups = k / group;
  if (!importance) to.round(x, groups);
  for (int64_t g = 0; importance && g < groups; g += kLanes) {
    to.search_eight(x, importance, g, static_cast<int>(groups - g < kLanes ? groups - g : kLanes));
  }
  const int64_t used = f.biases_offset(k) + groups * dtype_bytes(f.scale_type);
  std::memset(out + used, 0, f.row_bytes(k) - used);
}

#define MM_AFFINE(name, Struct, bits, ...) \
  template void quantize_affine<bits>(const Format&, const float*, int64_t, uint8_t*, const float*);
#include "metal/formats.def"

}  // namespace metalmm::cpu::quant
