// K-quants without an offset: q3_k q6_k. 256 values in 16 groups, w = (d * sc) * q.

#include <cstring>

#include "formats.h"
#include "importance/weigh.h"
#include "pack.h"
#include "search.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 256;
constexpr int kGroup = 16;
constexpr int kGroups = kBlock / kGroup;

// q = clamp(rint(x / spacing), -high, high - 1) + high for one group.
template <int kHigh>
void requantize(const float* x, float spacing, uint8_t* q) {
  for (int i = 0; i < kGroup; ++i) {
    q[i] = static_cast<uint8_t>(static_cast<int32_t>(to_code(x[i] / spacing, -kHigh, kHigh - 1)) +
                                kHigh);
  }
}

// The codes that a search gave eight groups: high + rint(inv * x), 0 where not filled.
template <int kHigh>
void searched_codes(const Lanes* x, const SymmetricFit& fit, Lanes* codes) {
  const Lanes low = set1(-kHigh), high = set1(kHigh - 1), shift = set1(kHigh);
  for (int i = 0; i < kGroup; ++i) {
    codes[i] = only(fit.filled, to_code(fit.inv * x[i], low, high) + shift);
  }
}

// q3_k: the scale of the scales, theirs as codes of -32 to 31, and the codes of the search.
struct Searched {
  float d, code[kGroups], q[kGroups / kLanes][kGroup][kLanes];
};

Searched search_q3_k(const float* x) {
  Searched found;
  float scale[kGroups];
  for (int half = 0; half < kGroups / kLanes; ++half) {
    Lanes lanes[kGroup], codes[kGroup];
    elements_first<kGroup>(x + half * kLanes * kGroup, lanes);
    store(scale + half * kLanes, search_descent<kGroup, 4>(lanes, codes));
    for (int i = 0; i < kGroup; ++i) store(found.q[half][i], codes[i]);
  }
  const float top = signed_max(scale, kGroups);
  const float inv = -32 / top;
  found.d = top == 0 ? 0.f : 1 / inv;
  for (int s = 0; s < kGroups; ++s) {
    found.code[s] = top == 0 ? -32.f : to_code(inv * scale[s], -32, 31);
  }
  return found;
}

// The search with weights; each group weighs the sum of its weights.
Searched search_q3_k(const float* x, const float* weights) {
  Searched found;
  float scale[kGroups], sums[kGroups];
  for (int half = 0; half < kGroups / kLanes; ++half) {
    Lanes lanes[kGroup], w[kGroup], codes[kGroup], sum = set1(0.f);
    elements_first<kGroup>(x + half * kLanes * kGroup, lanes);
    elements_first<kGroup>(weights + half * kLanes * kGroup, w);
    for (int i = 0; i < kGroup; ++i) sum += w[i];
    store(sums + half * kLanes, sum);
    const SymmetricFit fit = search_symmetric<kGroup, 4>(lanes, w);
    store(scale + half * kLanes, fit.scale);
    searched_codes<4>(lanes, fit, codes);
    for (int i = 0; i < kGroup; ++i) store(found.q[half][i], codes[i]);
  }
  Lanes v[kGroups], w[kGroups], codes[kGroups];
  for (int s = 0; s < kGroups; ++s) {
    v[s] = set1(scale[s]);
    w[s] = set1(sums[s]);
  }
  const SymmetricFit fit = search_symmetric<kGroups, 32>(v, w);
  searched_codes<32>(v, fit, codes);
  float lanes[kLanes];
  store(lanes, fit.scale);
  found.d = lanes[0];
  for (int s = 0; s < kGroups; ++s) {
    store(lanes, codes[s]);
    found.code[s] = lanes[0] - 32;
  }
  return found;
}

// w: the weights of x, or nullptr.
void pack_q3_k(const float* x, const float* w, uint8_t* out) {
  const Searched found = w ? search_q3_k(x, w) : search_q3_k(x);
  const float d = store_half(out + 108, found.d);
  uint8_t q[kBlock], sc[kGroups];
  for (int s = 0; s < kGroups; ++s) {
    const float code = found.code[s];
    sc[s] = static_cast<uint8_t>(static_cast<int32_t>(code) + 32);
    const float spacing = d * code;
    requantize<4>(x + s * kGroup, spacing, q + s * kGroup);
    for (int i = 0; i < kGroup && spacing == 0; ++i) {
      q[s * kGroup + i] = static_cast<uint8_t>(found.q[s / kLanes][i][s % kLanes]);
    }
  }
  uint8_t low[kBlock], top_bit[kBlock], sc_low[kGroups], sc_top[kGroups];
  split_codes<2>(q, kBlock, low, top_bit);
  split_codes<4>(sc, kGroups, sc_low, sc_top);
  join_fields<1, 32>(top_bit, kBlock, out);
  join_fields<2, 32>(low, kBlock, out + 32);
  join_fields<4, 8>(sc_low, kGroups, out + 96);
  join_fields<2, 4>(sc_top, kGroups, out + 104);
}

void pack_q6_k(const float* x, const float* weights, uint8_t* out) {
  float scale[kGroups], search_inv[kGroups], filled[kGroups];
  for (int first = 0; first < kGroups; first += kLanes) {
    Lanes lanes[kGroup], w[kGroup];
    elements_first<kGroup>(x + first * kGroup, lanes);
    if (weights) {
      elements_first<kGroup>(weights + first * kGroup, w);
    } else {
      squares<kGroup>(lanes, w);
    }
    const SymmetricFit fit = search_symmetric<kGroup, 32>(lanes, w);
    store(scale + first, fit.scale);
    store(search_inv + first, fit.inv);
    store(filled + first, only(fit.filled, set1(1.f)));
  }
  const float top = signed_max(scale, kGroups);
  if (magnitude(top) < kTiny) {
    std::memset(out, 0, 210);
    return;
  }
  const float inv = -128 / top;
  const float d = store_half(out + 208, 1 / inv);
  uint8_t q[kBlock], low[kBlock], high[kBlock];
  for (int s = 0; s < kGroups; ++s) {
    const float code = to_code(inv * scale[s], -128, 127);
    out[192 + s] = static_cast<uint8_t>(static_cast<int8_t>(code));
    const float spacing = d * code;
    if (spacing != 0) {
      requantize<32>(x + s * kGroup, spacing, q + s * kGroup);
      continue;
    }
    for (int i = s * kGroup; i < (s + 1) * kGroup; ++i) {
      const float searched = to_code(search_inv[s] * x[i], -32, 31) + 32;
      q[i] = static_cast<uint8_t>(filled[s] == 0 ? 0.f : searched);
    }
  }
  split_codes<4>(q, kBlock, low, high);
  join_fields<4, 64>(low, kBlock, out);
  join_fields<2, 32>(high, kBlock, out + 128);
}

}  // namespace

MM_WITH_WEIGHTS(q3_k, kBlock, 110)
MM_WITH_WEIGHTS(q6_k, kBlock, 210)

}  // namespace metalmm::cpu::quant
