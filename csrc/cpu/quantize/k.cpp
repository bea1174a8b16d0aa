// K-quants with an offset: q2_k q4_k q5_k. 256 values in groups of 16 or 32,
// w = (d * sc) * q - (dmin * m), the scales sc and offsets m of the groups being quantized too.

#include <cmath>

#include "formats.h"
#include "importance/weigh.h"
#include "pack.h"
#include "search.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 256;
constexpr int kMaxGroups = 16;

// Integer scales: v ~ d * code.
struct Scales {
  float d;
  uint8_t code[kMaxGroups];
};

// Codes of the scales of a block's groups and of their offsets.
struct Pair {
  Scales sc, m;
};

// top = the largest of +0 and v; d = top / levels; code = clamp(rint((levels / top) * v)), and 0
// where top is 0.
Scales quantize_scales(const float* v, int n, float levels) {
  float top = 0;
  for (int i = 0; i < n; ++i) top = v[i] > top ? v[i] : top;
  const float inv = levels / top;
  Scales s{top / levels, {}};
  for (int i = 0; i < n && top != 0; ++i) {
    s.code[i] = code_byte(to_code(inv * v[i], 0.f, levels));
  }
  return s;
}

// Importance of a value in the search of q4_k and q5_k: root mean square of the group + |x|.
template <int kGroup>
void energy_weights(const Lanes* x, Lanes* w) {
  Lanes sum = set1(0.f);
  for (int i = 0; i < kGroup; ++i) sum += x[i] * x[i];
  float mean[kLanes];
  store(mean, sum / set1(kGroup));
  for (float& v : mean) v = std::sqrt(v);
  for (int i = 0; i < kGroup; ++i) w[i] = load(mean) + abs(x[i]);
}

// The search's results for the groups of one block, and the sum of the weights of each.
struct Searched {
  float scale[kMaxGroups], offset[kMaxGroups], inv[kMaxGroups], low[kMaxGroups], w[kMaxGroups];

  void set(int first, const AsymmetricFit& fit) {
    store(scale + first, fit.scale);
    store(offset + first, fit.offset);
    store(inv + first, fit.inv);
    store(low + first, fit.low);
  }
};

// Scales and offsets of kN groups, each weighing the sum of its weights.
template <int kN, int kHigh>
Pair weighted_scales(const Searched& found) {
  Lanes v[kN], w[kN], codes[kN];
  for (int i = 0; i < kN; ++i) {
    const float both[kLanes] = {found.scale[i], found.offset[i]};
    v[i] = load(both);
    w[i] = set1(found.w[i]);
  }
  float d[kLanes], code[kLanes];
  store(d, search_positive<kN, kHigh>(v, w, codes));
  Pair pair{{d[0], {}}, {d[1], {}}};
  for (int i = 0; i < kN; ++i) {
    store(code, codes[i]);
    pair.sc.code[i] = code_byte(code[0]);
    pair.m.code[i] = code_byte(code[1]);
  }
  return pair;
}

template <int kN, int kHigh>
Pair scales_of(const Searched& found, bool weighted) {
  if (weighted) return weighted_scales<kN, kHigh>(found);
  return {quantize_scales(found.scale, kN, kHigh), quantize_scales(found.offset, kN, kHigh)};
}

// The search with an importance, of the eight groups from `first` on.
template <int kGroup, int kHigh>
void search_weighted(const Lanes* x, const float* weights, int first, Searched& found) {
  Lanes w[kGroup], sum = set1(0.f);
  elements_first<kGroup>(weights + first * kGroup, w);
  for (int i = 0; i < kGroup; ++i) sum += w[i];
  store(found.w + first, sum);
  found.set(first, search_asymmetric<kGroup, kHigh, 36, false>(x, w, -0.9f, 0.05f));
}

// q = clamp(rint((x + dmin * m) / (d * sc))), d and dmin as they will be decoded; a group whose
// decoded scale is 0 keeps the codes of the search.
template <int kGroup, int kHigh>
void requantize(const float* x, const Searched& found, const Pair& codes, float d, float dmin,
                uint8_t* q) {
  for (int s = 0; s < kBlock / kGroup; ++s, x += kGroup, q += kGroup) {
    const float spacing = d * codes.sc.code[s];
    const float shift = dmin * codes.m.code[s];
    const bool decodes = spacing != 0;
    for (int i = 0; i < kGroup; ++i) {
      const float v = decodes ? (x[i] + shift) / spacing : found.inv[s] * (x[i] - found.low[s]);
      q[i] = code_byte(to_code(v, 0.f, kHigh));
    }
  }
}

// Eight 6-bit sc and m in 12 bytes.
void pack_scales(const uint8_t* sc, const uint8_t* m, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    out[i] = static_cast<uint8_t>(sc[i] | (sc[i + 4] >> 4) << 6);
    out[i + 4] = static_cast<uint8_t>(m[i] | (m[i + 4] >> 4) << 6);
    out[i + 8] = static_cast<uint8_t>((sc[i + 4] & 15) | (m[i + 4] & 15) << 4);
  }
}

// q4_k and q5_k: fills d, dmin and the scales, the first 16 bytes of both, and the codes q.
// weights: those of x, or nullptr.
template <int kHigh, int kLastTrial>
void quantize_sixes(const float* x, const float* weights, float start, uint8_t* out, uint8_t* q) {
  constexpr int kGroup = 32, kGroups = kBlock / kGroup;
  Lanes lanes[kGroup], w[kGroup];
  elements_first<kGroup>(x, lanes);
  Searched found;
  if (weights) {
    search_weighted<kGroup, kHigh>(lanes, weights, 0, found);
  } else {
    energy_weights<kGroup>(lanes, w);
    found.set(0, search_asymmetric<kGroup, kHigh, kLastTrial, false>(lanes, w, start, 0.1f));
  }
  const Pair codes = scales_of<kGroups, 63>(found, weights);
  const float d = store_half(out, codes.sc.d);
  const float dmin = store_half(out + 2, codes.m.d);
  pack_scales(codes.sc.code, codes.m.code, out + 4);
  requantize<kGroup, kHigh>(x, found, codes, d, dmin, q);
}

void pack_q2_k(const float* x, const float* weights, uint8_t* out) {
  constexpr int kGroup = 16, kGroups = kBlock / kGroup;
  Searched found;
  for (int first = 0; first < kGroups; first += kLanes) {
    Lanes lanes[kGroup], w[kGroup];
    elements_first<kGroup>(x + first * kGroup, lanes);
    if (weights) {
      search_weighted<kGroup, 3>(lanes, weights, first, found);
      continue;
    }
    for (int i = 0; i < kGroup; ++i) w[i] = abs(lanes[i]);
    found.set(first, search_asymmetric<kGroup, 3, 15, true>(lanes, w, -0.5f, 0.1f));
  }
  const Pair codes = scales_of<kGroups, 15>(found, weights);
  for (int s = 0; s < kGroups; ++s) {
    out[s] = static_cast<uint8_t>(codes.sc.code[s] | codes.m.code[s] << 4);
  }
  const float d = store_half(out + 80, codes.sc.d);
  const float dmin = store_half(out + 82, codes.m.d);
  uint8_t q[kBlock];
  requantize<kGroup, 3>(x, found, codes, d, dmin, q);
  join_fields<2, 32>(q, kBlock, out + 16);
}

void pack_q4_k(const float* x, const float* weights, uint8_t* out) {
  uint8_t q[kBlock];
  quantize_sixes<15, 20>(x, weights, -1.f, out, q);
  join_fields<4, 32>(q, kBlock, out + 16);
}

void pack_q5_k(const float* x, const float* weights, uint8_t* out) {
  uint8_t q[kBlock], low[kBlock], top[kBlock];
  quantize_sixes<31, 15>(x, weights, -0.5f, out, q);
  split_codes<4>(q, kBlock, low, top);
  join_fields<1, 32>(top, kBlock, out + 16);
  join_fields<4, 32>(low, kBlock, out + 48);
}

}  // namespace

MM_WITH_WEIGHTS(q2_k, kBlock, 84)
MM_WITH_WEIGHTS(q4_k, kBlock, 144)
MM_WITH_WEIGHTS(q5_k, kBlock, 176)

}  // namespace metalmm::cpu::quant
