// K-quants without an offset: q3_k q6_k. 256 values in 16 sub-blocks, w = (d * sc) * q.

#include <cstring>

#include "formats.h"
#include "pack.h"
#include "search.h"

namespace metalmm::cpu::quant {
namespace {

constexpr int kBlock = 256;
constexpr int kSub = 16;
constexpr int kSubs = kBlock / kSub;

// q = clamp(rint(x / step), -high, high - 1) + high for one sub-block.
template <int kHigh>
void requantize(const float* x, float step, uint8_t* q) {
  for (int i = 0; i < kSub; ++i) {
    q[i] =
        static_cast<uint8_t>(static_cast<int32_t>(to_code(x[i] / step, -kHigh, kHigh - 1)) + kHigh);
  }
}

}  // namespace

void quantize_q3_k(const float* x, uint8_t* out) {
  float scale[kSubs], searched[kSubs / kLanes][kSub][kLanes];
  for (int part = 0; part < kSubs / kLanes; ++part) {
    Lanes lanes[kSub], codes[kSub];
    elements_first<kSub>(x + part * kLanes * kSub, lanes);
    store(scale + part * kLanes, search_descent<kSub, 4>(lanes, codes));
    for (int i = 0; i < kSub; ++i) store(searched[part][i], codes[i]);
  }
  const float top = signed_max(scale, kSubs);
  const float inv = -32 / top;
  const float d = store_half(out + 108, top == 0 ? 0.f : 1 / inv);
  uint8_t q[kBlock], sc[kSubs];
  for (int s = 0; s < kSubs; ++s) {
    const float code = top == 0 ? -32.f : to_code(inv * scale[s], -32, 31);
    sc[s] = static_cast<uint8_t>(static_cast<int32_t>(code) + 32);
    const float step = d * code;
    requantize<4>(x + s * kSub, step, q + s * kSub);
    for (int i = 0; i < kSub && step == 0; ++i) {
      q[s * kSub + i] = static_cast<uint8_t>(searched[s / kLanes][i][s % kLanes]);
    }
  }
  uint8_t low[kBlock], top_bit[kBlock], sc_low[kSubs], sc_top[kSubs];
  for (int i = 0; i < kBlock; ++i) {
    low[i] = q[i] & 3;
    top_bit[i] = q[i] >> 2;
  }
  for (int s = 0; s < kSubs; ++s) {
    sc_low[s] = sc[s] & 15;
    sc_top[s] = sc[s] >> 4;
  }
  join_fields<1, 32>(top_bit, kBlock, out);
  join_fields<2, 32>(low, kBlock, out + 32);
  join_fields<4, 8>(sc_low, kSubs, out + 96);
  join_fields<2, 4>(sc_top, kSubs, out + 104);
}

void quantize_q6_k(const float* x, uint8_t* out) {
  float scale[kSubs], search_inv[kSubs], filled[kSubs];
  for (int first = 0; first < kSubs; first += kLanes) {
    Lanes lanes[kSub];
    elements_first<kSub>(x + first * kSub, lanes);
    const SymmetricFit fit = search_symmetric<kSub, 32>(lanes);
    store(scale + first, fit.scale);
    store(search_inv + first, fit.inv);
    store(filled + first, only(fit.filled, set1(1.f)));
  }
  const float top = signed_max(scale, kSubs);
  if (magnitude(top) < kTiny) {
    std::memset(out, 0, 210);
    return;
  }
  const float inv = -128 / top;
  const float d = store_half(out + 208, 1 / inv);
  uint8_t q[kBlock], low[kBlock], high[kBlock];
  for (int s = 0; s < kSubs; ++s) {
    const float code = to_code(inv * scale[s], -128, 127);
    out[192 + s] = static_cast<uint8_t>(static_cast<int8_t>(code));
    const float step = d * code;
    if (step != 0) {
      requantize<32>(x + s * kSub, step, q + s * kSub);
      continue;
    }
    for (int i = s * kSub; i < (s + 1) * kSub; ++i) {
      const float searched = to_code(search_inv[s] * x[i], -32, 31) + 32;
      q[i] = static_cast<uint8_t>(filled[s] == 0 ? 0.f : searched);
    }
  }
  for (int i = 0; i < kBlock; ++i) {
    low[i] = q[i] & 15;
    high[i] = q[i] >> 4;
  }
  join_fields<4, 64>(low, kBlock, out);
  join_fields<2, 32>(high, kBlock, out + 128);
}

}  // namespace metalmm::cpu::quant
