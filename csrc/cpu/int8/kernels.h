// The kernels that the int8 driver calls: one table per instruction set, chosen at run time. No
// torch.
//
// x is rounded to codes q of 8 or 16 bits, blocks of kChunkValues values sharing a scale s; a
// packed weight is w = d q' + m with q' of 8 bits, unsigned, blocks of 16 or 32 values sharing d
// and m:
//   sum x w = sum over blocks of s (d sum q q' + m sum q)
// The sums of a block are integers, exact; the rest is f32. A code of 16 bits is kBase high + low,
// two parts of 8 bits, for the instructions that multiply bytes.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace metalmm::cpu::int8 {

// Odd: parts of -127 to 127, which signed bytes negate, have each code up to 127 * 256 in one way.
constexpr int kBase = 255;
// A code of x has 1 or 2 parts.
constexpr int kMaxParts = 2;

// The properties of a format that decide its kernels.
struct Kind {
  int sub;     // values that share d and m: 16 or 32
  bool min;    // w = d q' + m, m stored; otherwise m = -offset d, and the offset is taken from q'
  bool wide;   // q' may be above 127, which multiplications of signed bytes do not take
  int offset;  // 0 where m is stored
  constexpr int index() const { return (sub == 16) + 2 * min + 4 * wide; }
};
constexpr int kNumKinds = 8;

// How rows of x lie in vectors of `bytes`: `span` values of K of each of bytes / span rows. The
// sums of a row depend on the span, not on the length of the vector.
constexpr int kGemmSpan = 4, kBatchedSpan = 8;
struct Layout {
  int bytes, span;
  constexpr int rows() const { return bytes / span; }
  constexpr int row_lanes() const { return span / 4; }
  // A panel is rows() rows of x; of each chunk it holds the codes, a vector of scales, and for each
  // group of `sub` values, or of a vector's span where that is more, a vector of what is added.
  constexpr int addends(int sub) const { return kChunkValues / (sub > span ? sub : span); }
  constexpr int64_t chunk_bytes(int sub) const {
    return kChunkValues / span * bytes + (1 + addends(sub)) * bytes;
  }
};

// Chunks [first_chunk, last_chunk) of a panel of the rows [0, rows) of x; the rows beyond are
// zeros. out begins at the panel's chunk 0.
struct PackArgs {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  int64_t first_chunk, last_chunk;
  int offset;
  uint8_t* out;
};
using PackKernel = void (*)(const PackArgs&);

// A row of x for gemv: its codes, of a chunk part by part; for each group of W its scale; and what
// is added: -offset sum q of the group in lanes of 4 values, int32, or s sum q, f32.
struct RoundedRow {
  int8_t* codes;
  float* scale;
  uint8_t* added;
  static constexpr int64_t bytes(int64_t k, int parts) {
    return (parts + 1) * k + k / kChunkValues * 2 * static_cast<int64_t>(sizeof(float));
  }
  // In bytes(k, parts) of memory.
  static RoundedRow in(uint8_t* memory, int64_t k, int parts) {
    uint8_t* added = memory + parts * k;
    return {reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(added + k), added};
  }
};
// Chunks [first_chunk, last_chunk) of a row.
using RoundKernel = void (*)(const float* x, int64_t first_chunk, int64_t last_chunk, int offset,
                             const RoundedRow& out);

// y[m * y_stride + n - first_row] = x[m] w[n] for the rows [first_row, last_row), and as many m as
// the kernel is compiled for.
struct GemvArgs {
  Weight weight;
  int64_t first_row, last_row;
  const RoundedRow* x;
  float* y;
  int64_t y_stride;
};
using GemvKernel = void (*)(const GemvArgs&);

// Values of K that are decoded at a time for a tile, and the distance of decoded rows: constants,
// so that the addresses of a tile's rows are immediates; no multiple of 4 KiB.
constexpr int64_t kDecodeK = 512;
constexpr int64_t kCodeStride = kDecodeK + 64;
constexpr int64_t kScaleStride = kDecodeK / 16;

// Decoded rows of W, kCodeStride and kScaleStride apart.
struct Decoded {
  uint8_t* codes;
  float *scale, *min;
  Decoded row(int64_t r) const {
    return {codes + r * kCodeStride, scale + r * kScaleStride, min + r * kScaleStride};
  }
};
// Values [first, last) of a row; both are multiples of the block.
using DecodeKernel = void (*)(const Weight&, int64_t row, int64_t first, int64_t last,
                              const Decoded& out);

// c[r * c_stride + p * lanes + lane] (+)= what this lane of panel p gives with row r of w, for r <
// the tile's rows, p < its panels.
struct TileArgs {
  Decoded w;
  const uint8_t* x;
  int64_t panel_stride;  // bytes
  int64_t chunks;
  float* c;
  int64_t c_stride;
  bool accumulate;
};
struct Tile {
  void (*run)(const TileArgs&);
  int rows;
};
constexpr int kMaxPanels = 4;

// By parts - 1.
template <class Kernel>
using ByParts = Kernel[kMaxParts];
struct KindKernels {
  ByParts<RoundKernel> round;
  ByParts<PackKernel> pack_narrow, pack_batched, pack_gemm;
  Tile narrow, batched[kMaxPanels], gemm[kMaxPanels];  // the last two by panels - 1
};

// Rows of codes of x that gemv takes by one decoding of W. Zen 5, q4_k, 14336 x 4096: 2 rows of
// int8 in 1.5 of the time of one, 4 in 2.6; gemv_batched takes 3.9 for any up to 8.
constexpr int kMaxGemvCodes = 4;

struct CodecKernels {
  Kind kind;
  // By rows of x - 1, up to kMaxGemvCodes / parts. Null: the format has no integer codes.
  ByParts<GemvKernel[kMaxGemvCodes]> gemv;
  DecodeKernel decode;
};

struct Kernels {
  Layout narrow, batched, gemm;     // narrow: batched in shorter vectors, one panel a tile
  int batched_panels, gemm_panels;  // the most of a tile
  KindKernels kind[kNumKinds];
  CodecKernels codec[kNumCodecs];
};

// The kernels of the instruction set in use.
const Kernels& current_kernels();

// Whether the format has integer codes; a product with one that has none is exact.
bool has_codes(const Format& format);

}  // namespace metalmm::cpu::int8
