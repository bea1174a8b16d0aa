// GGML blocks whose codes open() turns into a byte each, with a scale per 16 values: ternary ones,
// nvfp4, and those of grids (grid.h). The bytes of a block stay in the first-level cache, and every
// vector of values is a load, a conversion and a product.
//
// Formats of 256 values share the kernels of ByteCodes, which are given a ByteFormat: such a one is
// a struct of open(block, ByteBlock<256>&). Where that takes little time a call by address costs: a
// tenth of tq2_0's at M = 1, a fourth of nvfp4's. These have kernels of their own.
#pragma once

#include "codec.h"

namespace metalmm::cpu::MM_ISA {

// open() of a block is a call: inlined for every row of every kernel, it triples the compilation.
#define MM_ONCE __attribute__((noinline))

template <int kValues, int kBytes>
struct ByteCodec : BlockCodec<kValues, kBytes> {
  using Block = ByteBlock<kValues>;
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    constexpr int kFirst = kVector * kWidth;
    const uint8_t* q = reinterpret_cast<const uint8_t*>(k.q) + chunk * kChunkValues + kFirst;
    return to_float(load_s8(q)) * set1(k.scale[2 * chunk + kFirst / 16]);
  }
};

struct ByteCodes : ByteCodec<256, 0> {  // of so many bytes as the format says
  struct Row {
    const uint8_t* p;
    ByteFormat format;  // not read again at each block
  };
  static MM_INLINE Row row(const uint8_t* p, const RowLayout& l) { return {p, *l.bytes}; }
  static MM_INLINE int block_bytes(const Row& row) { return row.format.block_bytes; }
  static MM_INLINE void open(const Row& row, int64_t block, Block& k) {
    row.format.open(row.p + block * block_bytes(row), k);
  }
};

template <int kBytes>
struct OfBytes : BlockCodec<256, kBytes> {
  using Block = ByteBlock<256>;
  static constexpr bool kIsOfBytes = true;
};

MM_INLINE void scale_all(ByteBlock<256>& k, float d) {
  for (float& scale : k.scale) scale = d;
}

// d (q - 1): five digits of base 3 in a byte (52 bytes: 32, 16, 4 with four digits).
struct TQ1_0 : OfBytes<54> {
  // Digit n is 0 up to 85, 1 up to 170 and 2 beyond, of the low byte of 3^n times the byte.
  template <class Codes, int kDigits>
  static MM_INLINE int8_t* digits(const uint8_t* bytes, int8_t* out) {
    Codes low = load_as<Codes>(bytes);
    for (int n = 0; n < kDigits; ++n, out += sizeof low, low += low + low) {
      const Codes q =
          Codes{} - 1 - reinterpret_cast<Codes>(low > 85) - reinterpret_cast<Codes>(low > 170);
      std::memcpy(out, &q, sizeof q);
    }
    return out;
  }
  static void open(const uint8_t* b, Block& k) {
    typedef uint8_t Half __attribute__((vector_size(16)));
    typedef uint8_t Four __attribute__((vector_size(4)));
    int8_t* q = digits<Bytes, 5>(b, k.q);
    q = digits<Half, 5>(b + 32, q);
    digits<Four, 4>(b + 48, q);
    scale_all(k, half_to_float(b + 52));
  }
};

// d (q - 1): two bits a code; bits [2t, 2t + 2) of byte 32n + l are value 128n + 32t + l.
struct TQ2_0 : ByteCodec<256, 66> {
  static MM_ONCE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    for (int chunk = 0; chunk < 8; ++chunk) {
      const Bytes q = (load_bytes(b + chunk / 4 * 32) >> chunk % 4 * 2 & 3) - 1;
      std::memcpy(k.q + chunk * kChunkValues, &q, sizeof q);
    }
    scale_all(k, half_to_float(b + 64));
  }
};

// s / 2 times a doubled FP4 value: s e4m3 of 16 values, its sign ignored, 0x7F being 0. Byte j of
// the 8 of an s: value j (low nibble) and j + 8.
struct NVFP4 : ByteCodec<64, 36> {
  static MM_INLINE float scale(uint8_t s) {
    const int exponent = s >> 3 & 15, mantissa = s & 7;
    const int units = exponent ? (8 + mantissa) << (exponent - 1) : mantissa;
    return s == 0x7f ? 0.f : static_cast<float>(units) * (1 / 1024.f);
  }
  // The codes of two groups in the order of their values.
  static MM_INLINE Bytes nibbles_of(const uint8_t* qs) {
    uint8_t both[kChunkValues];
    for (int i = 0; i < 4; ++i) std::memcpy(both + 8 * i, qs + i / 2 * 8, 8);
    typedef uint64_t Longs __attribute__((vector_size(kChunkValues)));
    return reinterpret_cast<Bytes>(load_as<Longs>(both) >> Longs{0, 4, 0, 4}) & 15;
  }
  static MM_ONCE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    static constexpr ByteTable kTable = byte_table(kFP4Doubled, 0);
    for (int g = 0; g < 4; ++g) k.scale[g] = scale(b[g]);
    for (int chunk = 0; chunk < 2; ++chunk) {
      const Bytes q = look_up(kTable.entry, nibbles_of(b + 4 + 16 * chunk));
      std::memcpy(k.q + chunk * kChunkValues, &q, sizeof q);
    }
  }
};

// 2^(e - 127) times an e4m3 value, an integer of 2^-9: e of 32 values, inf where it is 255.
struct MXFP8 : BlockCodec<64, 66> {
  struct Block {
    float scale[2];  // 2^(e - 136); e < 10: subnormal
    const uint8_t* q;
  };
  static MM_INLINE float scale(uint32_t e) {
    const uint32_t bits = e == 255 ? 0x7f800000u : e < 10 ? 1u << (e + 13) : (e - 9) << 23;
    return load_as<float>(&bits);
  }
  static MM_INLINE void open(Row row, int64_t block, Block& k) {
    const uint8_t* b = at(row, block);
    k = {{scale(b[0]), scale(b[1])}, b + 2};
  }
  // The code as a half of the same mantissa, whose bias is 8 more: the value times 2^-8, subnormals
  // included.
  template <int kVector>
  static MM_INLINE F get(const Block& k, int chunk) {
    const U16 code = load_u8_as_u16(k.q + chunk * kChunkValues + kVector * kWidth);
    const F part = from_halves((code & 127) << 7 | (code & 128) << 8);
    return part * set1(0x1p17f) * set1(k.scale[chunk]);
  }
};

}  // namespace metalmm::cpu::MM_ISA
