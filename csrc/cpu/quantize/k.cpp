// K-quants with an offset: q2_k q4_k q5_k. 256 values in groups of 16 or 32,
// w = (d * sc) * q - (dmin * m), the scales sc and offsets m of the groups being quantized too.

#include <cmath>
#include <cstring>

#include "formats.h"
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

// top = the largest of +0 and v; d = top / levels; code = clamp(rint((levels / top) * v)), and 0
// where top is 0.
Scales quantize_scales(const float* v, int n, float levels) {
  float top = 0;
  for (int i = 0; i < n; ++i) top = v[i] > top ? v[i] : top;
  const float inv = levels / top;
  Scales s{top / levels, {}};
  for (int i = 0; i < n && top != 0; ++i) {
    s.code[i] = static_cast<uint8_t>(static_cast<int32_t>(to_code(inv * v[i], 0.f, levels)));
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

// The search's results for the groups of one block.
struct Searched {
  float scale[kMaxGroups], offset[kMaxGroups], inv[kMaxGroups], low[kMaxGroups];

  void set(int first, const AsymmetricFit& fit) {
    store(scale + first, fit.scale);
    store(offset + first, fit.offset);
    store(inv + first, fit.inv);
    store(low + first, fit.low);
  }
};

// q = clamp(rint((x + dmin * m) / (d * sc))), d and dmin as they will be decoded; a group whose
// decoded scale is 0 keeps the codes of the search.
template <int kGroup, int kHigh>
void requantize(const float* x, const Searched& found, const Scales& sc, const Scales& m, float d,
                float dmin, uint8_t* q) {
  for (int s = 0; s < kBlock / kGroup; ++s, x += kGroup, q += kGroup) {
    const float spacing = d * sc.code[s];
    const float shift = dmin * m.code[s];
    const bool decodes = spacing != 0;
    for (int i = 0; i < kGroup; ++i) {
      const float v = decodes ? (x[i] + shift) / spacing : found.inv[s] * (x[i] - found.low[s]);
      q[i] = static_cast<uint8_t>(static_cast<int32_t>(to_code(v, 0.f, kHigh)));
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
template <int kHigh, int kLastTrial>
void quantize_sixes(const float* x, float start, uint8_t* out, uint8_t* q) {
  constexpr int kGroup = 32, kGroups = kBlock / kGroup;
  Lanes lanes[kGroup], w[kGroup];
  elements_first<kGroup>(x, lanes);
  energy_weights<kGroup>(lanes, w);
  Searched found;
  found.set(0, search_asymmetric<kGroup, kHigh, kLastTrial, false>(lanes, w, start, 0.1f));
  const Scales sc = quantize_scales(found.scale, kGroups, 63);
  const Scales m = quantize_scales(found.offset, kGroups, 63);
  const float d = store_half(out, sc.d);
  const float dmin = store_half(out + 2, m.d);
  pack_scales(sc.code, m.code, out + 4);
  requantize<kGroup, kHigh>(x, found, sc, m, d, dmin, q);
}

}  // namespace

void quantize_q2_k(const float* x, uint8_t* out) {
  constexpr int kGroup = 16, kGroups = kBlock / kGroup;
  Searched found;
  for (int first = 0; first < kGroups; first += kLanes) {
    Lanes lanes[kGroup], w[kGroup];
    elements_first<kGroup>(x + first * kGroup, lanes);
    for (int i = 0; i < kGroup; ++i) w[i] = abs(lanes[i]);
    found.set(first, search_asymmetric<kGroup, 3, 15, true>(lanes, w, -0.5f, 0.1f));
  }
  const Scales sc = quantize_scales(found.scale, kGroups, 15);
  const Scales m = quantize_scales(found.offset, kGroups, 15);
  for (int s = 0; s < kGroups; ++s) out[s] = static_cast<uint8_t>(sc.code[s] | m.code[s] << 4);
  const float d = store_half(out + 80, sc.d);
  const float dmin = store_half(out + 82, m.d);
  uint8_t q[kBlock];
  requantize<kGroup, 3>(x, found, sc, m, d, dmin, q);
  join_fields<2, 32>(q, kBlock, out + 16);
}

void quantize_q4_k(const float* x, uint8_t* out) {
  uint8_t q[kBlock];
  quantize_sixes<15, 20>(x, -1.f, out, q);
  join_fields<4, 32>(q, kBlock, out + 16);
}

void quantize_q5_k(const float* x, uint8_t* out) {
  uint8_t q[kBlock], low[kBlock], top[kBlock];
  quantize_sixes<31, 15>(x, -0.5f, out, q);
  for (int i = 0; i < kBlock; ++i) {
    low[i] = q[i] & 15;
    top[i] = q[i] >> 4;
  }
  join_fields<1, 32>(top, kBlock, out + 16);
  join_fields<4, 32>(low, kBlock, out + 48);
}

}  // namespace metalmm::cpu::quant
