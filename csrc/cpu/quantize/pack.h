// Codes, one per byte, to bit fields.
#pragma once

#include <cstdint>
#include <cstring>

namespace metalmm::cpu::quant {

// The order of every GGML block: a weave of 8 / kBits * kWidth values fills kWidth bytes; field f
// of byte l is value f * kWidth + l of the weave.
template <int kBits, int kWidth>
inline void join_fields(const uint8_t* q, int n, uint8_t* out) {
  constexpr int kFields = 8 / kBits;
  for (; n > 0; n -= kFields * kWidth, q += kFields * kWidth, out += kWidth) {
    for (int l = 0; l < kWidth; ++l) {
      int byte = 0;
      for (int f = 0; f < kFields; ++f) byte |= q[f * kWidth + l] << (f * kBits);
      out[l] = static_cast<uint8_t>(byte);
    }
  }
}

// A little-endian bit stream: value i in bits [i * kBits, (i + 1) * kBits). n is a multiple of 8.
template <int kBits>
inline void pack_stream(const uint8_t* q, int64_t n, uint8_t* out) {
  for (; n > 0; n -= 8, q += 8, out += kBits) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(q[i]) << (i * kBits);
    std::memcpy(out, &word, kBits);
  }
}

// The kLow lower bits of n codes, and what is above.
template <int kLow>
inline void split_codes(const uint8_t* q, int n, uint8_t* low, uint8_t* top) {
  for (int i = 0; i < n; ++i) {
    low[i] = q[i] & ((1 << kLow) - 1);
    top[i] = q[i] >> kLow;
  }
}

// The 5-bit codes of 32 values: qh[4] | qs[16].
inline void pack_fives(const uint8_t* q, uint8_t* out) {
  constexpr int kBlock = 32;
  uint8_t low[kBlock], top[kBlock];
  split_codes<4>(q, kBlock, low, top);
  pack_stream<1>(top, kBlock, out);
  join_fields<4, 16>(low, kBlock, out + 4);
}

}  // namespace metalmm::cpu::quant
