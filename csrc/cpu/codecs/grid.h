// GGML blocks whose codes are indices of grids, tables that the shaders read too: iq1_s, iq1_m,
// iq2_*, iq3_*. Group g is values [8g, 8g + 8), chunk c groups 4c ... 4c + 3. w = (d (2 s + 1)) q,
// every product of which is exact: at most 22 bits.
#pragma once

#include "bytes.h"
#include "metal/formats/grids/signs.h"
#include "metal/formats/grids/table_iq1.h"
#include "metal/formats/grids/table_iq2.h"
#include "metal/formats/grids/table_iq3.h"

namespace metalmm::cpu::MM_ISA {

template <int kBytes>
struct GridBlock : OfBytes<kBytes> {
  using Block = ByteBlock<256>;
  static MM_INLINE float odd(uint32_t s) { return static_cast<float>(2 * s + 1); }
  static MM_INLINE void store_scales(Block& k, int chunk, float first, float second) {
    k.scale[2 * chunk] = first;
    k.scale[2 * chunk + 1] = second;
  }
  // Two scales of a byte's nibbles.
  static MM_INLINE void store_nibbles(Block& k, int chunk, float d, uint8_t s) {
    store_scales(k, chunk, d * odd(s & 15), d * odd(s >> 4));
  }
  static MM_INLINE void store_group(Block& k, int group, uint64_t bytes) {
    std::memcpy(k.q + 8 * group, &bytes, sizeof bytes);
  }
  // Magnitudes, negative under a mask. No carry, since none of them is 0.
  static MM_INLINE void store_signed(Block& k, int group, uint64_t magnitudes, uint64_t mask) {
    store_group(k, group, (magnitudes ^ mask) + (mask & 0x0101010101010101u));
  }
  static MM_INLINE uint64_t even_signs(uint32_t code) { return kEvenSigns[code & 127]; }
  // Magnitudes of chunk c, which are in its place, negative where the sign's bit is set.
  static MM_INLINE void sign_chunk(Block& k, int c, const uint8_t* signs) {
    const Bytes mask = spread_bits<255>(load_as<uint32_t>(signs + 4 * c));
    int8_t* q = k.q + c * kChunkValues;
    const Bytes out = (load_as<Bytes>(q) ^ mask) - mask;
    std::memcpy(q, &out, sizeof out);
  }
};

// d (2 s + 1) / 8; 8 bytes per chunk: four codes; four times 7 bits of signs, 4 bits of s.
struct IQ2_XXS : GridBlock<66> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b) * 0.125f;
    for (int c = 0; c < 8; ++c) {
      const uint8_t* codes = b + 2 + 8 * c;
      const uint32_t rest = load_as<uint32_t>(codes + 4);
      const float scale = d * odd(rest >> 28);
      store_scales(k, c, scale, scale);
      for (int j = 0; j < 4; ++j) {
        store_signed(k, 4 * c + j, kGridIQ2_XXS[codes[j]], even_signs(rest >> 7 * j));
      }
    }
  }
};

// d (2 s + 1) / 8; 9 bits of code and 7 of signs per group, then 4 bits of s per 16 values.
struct IQ2_XS : GridBlock<74> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b) * 0.125f;
    for (int c = 0; c < 8; ++c) store_nibbles(k, c, d, b[66 + c]);
    for (int g = 0; g < 32; ++g) {
      const uint32_t word = load_as<uint16_t>(b + 2 + 2 * g);
      store_signed(k, g, kGridIQ2_XS[word & 511], even_signs(word >> 9));
    }
  }
};

// d (2 s + 1) / 8; 8 bits of each code, signs, 2 bits of each code, 4 bits of s per 16 values.
struct IQ2_S : GridBlock<82> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b) * 0.125f;
    for (int c = 0; c < 8; ++c) store_nibbles(k, c, d, b[74 + c]);
    for (int g = 0; g < 32; ++g) {
      const uint32_t code = b[2 + g] | (b[66 + g / 4] >> g % 4 * 2 & 3) << 8;
      store_group(k, g, kGridIQ2_S[code]);
    }
    for (int c = 0; c < 8; ++c) sign_chunk(k, c, b + 34);
  }
};

// A code stands for four values.
template <int kBytes>
struct PairBlock : GridBlock<kBytes> {
  static MM_INLINE uint64_t two(uint32_t first, uint32_t second) {
    return first | static_cast<uint64_t>(second) << 32;
  }
};

// d (2 s + 1) / 4; codes, then per chunk four times 7 bits of signs and 4 bits of s.
struct IQ3_XXS : PairBlock<98> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b) * 0.25f;
    for (int c = 0; c < 8; ++c) {
      const uint32_t rest = load_as<uint32_t>(b + 66 + 4 * c);
      const float scale = d * odd(rest >> 28);
      store_scales(k, c, scale, scale);
      for (int j = 0; j < 4; ++j) {
        const uint8_t* codes = b + 2 + 8 * c + 2 * j;
        const uint64_t bytes = two(kGridIQ3_XXS[codes[0]], kGridIQ3_XXS[codes[1]]);
        store_signed(k, 4 * c + j, bytes, even_signs(rest >> 7 * j));
      }
    }
  }
};

// d (2 s + 1); 8 bits of each code, the ninth, signs, 4 bits of s per chunk.
struct IQ3_S : PairBlock<110> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b);
    for (int c = 0; c < 8; ++c) {
      const float scale = d * odd(b[106 + c / 2] >> c % 2 * 4 & 15);
      store_scales(k, c, scale, scale);
    }
    for (int g = 0; g < 32; ++g) {
      const uint8_t* codes = b + 2 + 2 * g;
      const uint32_t high = b[66 + g / 4] >> g % 4 * 2;
      const uint32_t first = codes[0] | (high & 1) << 8, second = codes[1] | (high & 2) << 7;
      store_group(k, g, two(kGridIQ3_S[first], kGridIQ3_S[second]));
    }
    for (int c = 0; c < 8; ++c) sign_chunk(k, c, b + 74);
  }
};

// Values of -1, 0 and 1, plus or minus an eighth: 8 q + 1 or 8 q - 1, the scale an eighth.
template <int kBytes>
struct EighthBlock : GridBlock<kBytes> {
  // The values of a code, 2 bits each, of 0, 1 or 2: spread over bytes, times 8, minus 7 or 9.
  static MM_INLINE uint64_t eighths(uint32_t code, bool minus) {
    uint64_t v = kGridIQ1[code];
    v = (v | v << 24) & 0x000000ff000000ffu;
    v = (v | v << 12) & 0x000f000f000f000fu;
    v = (v | v << 6) & 0x0303030303030303u;
    // Bytes are 0 to 16: bit 7 takes what the difference borrows, and is inverted.
    const uint64_t offset = 0x0707070707070707u + (-uint64_t{minus} & 0x0202020202020202u);
    return ((v << 3 | 0x8080808080808080u) - offset) ^ 0x8080808080808080u;
  }
};

// d (2 s + 1); 8 bits of each code, then per chunk 3 bits of each code, 3 bits of s, a sign.
struct IQ1_S : EighthBlock<50> {
  static void open(const uint8_t* b, Block& k) {
    const float d = half_to_float(b) * 0.125f;
    for (int c = 0; c < 8; ++c) {
      const uint32_t rest = load_as<uint16_t>(b + 34 + 2 * c);
      const float scale = d * odd(rest >> 12 & 7);
      store_scales(k, c, scale, scale);
      for (int j = 0; j < 4; ++j) {
        const uint32_t code = b[2 + 4 * c + j] | (rest >> 3 * j & 7) << 8;
        store_group(k, 4 * c + j, eighths(code, rest >> 15));
      }
    }
  }
};

// d (2 s + 1); 8 bits of each code, nibbles of 3 bits of each code and a sign, four words of 3 bits
// of s per 16 values, whose top nibbles make d.
struct IQ1_M : EighthBlock<56> {
  static void open(const uint8_t* b, Block& k) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= (b[49 + 2 * i] >> 4) << 4 * i;
    const uint16_t top = static_cast<uint16_t>(bits);
    const float d = half_to_float(reinterpret_cast<const uint8_t*>(&top)) * 0.125f;
    for (int c = 0; c < 8; ++c) {
      const uint32_t s = load_as<uint16_t>(b + 48 + c / 2 * 2) >> c % 2 * 6;
      store_scales(k, c, d * odd(s & 7), d * odd(s >> 3 & 7));
    }
    for (int g = 0; g < 32; ++g) {
      const uint32_t nibble = b[32 + g / 2] >> g % 2 * 4;
      store_group(k, g, eighths(b[g] | (nibble & 7) << 8, nibble >> 3 & 1));
    }
  }
};

}  // namespace metalmm::cpu::MM_ISA
