// q4_0 q4_1 q5_0 q5_1 with weights: eight blocks at a time, one per lane.

#include <cstring>

#include "cpu/quantize/formats.h"
#include "cpu/quantize/pack.h"
#include "cpu/quantize/search.h"
#include "weigh.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 32;

// The first min(blocks, kLanes) blocks of x, element i of each in lanes[i]; other lanes are 0.
void load_blocks(const float* x, int64_t blocks, Lanes* lanes) {
  if (blocks >= kLanes) return elements_first<kBlock>(x, lanes);
  float some[kLanes * kBlock] = {};
  std::memcpy(some, x, sizeof(float) * kBlock * blocks);
  elements_first<kBlock>(some, lanes);
}

// The stored fields of eight blocks: w = d * q + m; symmetric formats have no m.
struct Eight {
  float d[kLanes], m[kLanes];
  uint8_t q[kLanes][kBlock];

  void set(int i, Lanes codes) {
    float code[kLanes];
    store(code, codes);
    for (int l = 0; l < kLanes; ++l) q[l][i] = code_byte(code[l]);
  }
};

template <int kBits>
void symmetric(const Lanes* x, const Lanes* w, Eight& out) {
  constexpr int kHalf = 1 << (kBits - 1);
  const SymmetricFit fit = search_symmetric<kBlock, kHalf>(x, w);
  store(out.d, fit.scale);
  for (int i = 0; i < kBlock; ++i) {
    const Lanes code = to_code(fit.inv * x[i], set1(-kHalf), set1(kHalf - 1));
    out.set(i, only(fit.filled, code + set1(kHalf)));
  }
}

template <int kBits>
void asymmetric(const Lanes* x, const Lanes* w, Eight& out) {
  constexpr int kHigh = (1 << kBits) - 1;
  const AsymmetricFit fit = search_asymmetric<kBlock, kHigh, 36, false>(x, w, -0.9f, 0.05f);
  store(out.d, fit.scale);
  store(out.m, -fit.offset);
  for (int i = 0; i < kBlock; ++i) {
    out.set(i, to_code(fit.inv * (x[i] - fit.low), set1(0.f), set1(kHigh)));
  }
}

void pack_fours(const uint8_t* q, uint8_t* out) { join_fields<4, 16>(q, kBlock, out); }

template <int kBytes, void kSearch(const Lanes*, const Lanes*, Eight&),
          void kPack(const uint8_t*, uint8_t*), bool kHasOffset>
void quantize(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  for (; blocks > 0; blocks -= kLanes, x += kLanes * kBlock, w += kLanes * kBlock) {
    Lanes xs[kBlock], ws[kBlock];
    load_blocks(x, blocks, xs);
    load_blocks(w, blocks, ws);
    Eight found;
    kSearch(xs, ws, found);
    for (int l = 0; l < kLanes && l < blocks; ++l, out += kBytes) {
      store_u16(out, to_half(found.d[l]));
      if (kHasOffset) store_u16(out + 2, to_half(found.m[l]));
      kPack(found.q[l], out + (kHasOffset ? 4 : 2));
    }
  }
}

}  // namespace

void weighted_q4_0(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  quantize<18, symmetric<4>, pack_fours, false>(x, w, blocks, out);
}
void weighted_q5_0(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  quantize<22, symmetric<5>, pack_fives, false>(x, w, blocks, out);
}
void weighted_q4_1(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  quantize<20, asymmetric<4>, pack_fours, true>(x, w, blocks, out);
}
void weighted_q5_1(const float* x, const float* w, int64_t blocks, uint8_t* out) {
  quantize<24, asymmetric<5>, pack_fives, true>(x, w, blocks, out);
}

}  // namespace metalmm::cpu::quant
