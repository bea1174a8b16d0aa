// The kernels that the drivers call: one table per instruction set, chosen at run time. No torch.
// Kernels walk a row in chunks of kChunkValues.
#pragma once

#include <cstdint>

#include "metal/geometry.h"
#include "plan/format.h"
#include "plan/round.h"

namespace metalmm::cpu {

// f32 of every f16. Filled when the library is loaded, by code for the baseline instruction set.
extern const float* const half_table;

// A block of codes of a byte each, with a scale for 16 of them.
template <int kValues>
struct ByteBlock {
  int8_t q[kValues];
  float scale[kValues / 16];
};
// A format whose blocks become such ones of 256 values (codecs/bytes.h).
struct ByteFormat {
  int block_bytes;
  void (*open)(const uint8_t* block, ByteBlock<256>& out);
};

// The places of the planes of an affine row; unused by the other formats.
struct RowLayout {
  int64_t scales_offset = 0, biases_offset = 0;
  int group_shift = 0;  // log2 of the chunks that share a scale
  DType scale_type = DType::kF16;
  const ByteFormat* bytes = nullptr;  // set by the kernels that formats of bytes share
};

struct Weight {
  const uint8_t* data;
  int64_t row_stride;  // bytes
  int64_t k;           // values per row
  RowLayout layout;
  const uint8_t* row(int64_t n) const { return data + n * row_stride; }
};

inline Weight make_weight(const uint8_t* rows, int64_t row_bytes, const Format& format, int64_t k) {
  Weight out{rows, row_bytes, k, {}};
  if (format.layout == Layout::kAffine) {
    int shift = 0;
    while ((int64_t{kChunkValues} << shift) < format.block_values) ++shift;
    out.layout = {format.scales_offset(k), format.biases_offset(k), shift, format.scale_type};
  }
  return out;
}

// y[m * y_stride + n - first_row] = sum over k of x[m, k] w[n, k], for the rows [first_row,
// last_row) and as many m as the kernel is compiled for. The rows of x are interleaved by vectors:
// x[m, k] is at (k / width * M + m) * width + k % width, for k up to round_up(K, kChunkValues),
// zero beyond K. One stream, and immediate offsets for all m.
struct DotArgs {
  Weight weight;
  int64_t first_row, last_row;
  const float* x;
  float* y;
  int64_t y_stride;
};
using DotKernel = void (*)(const DotArgs&);

// The M for which a dot kernel is compiled. Another M takes the next larger one.
constexpr int kDotRows[] = {1, 2, 3, 4, 6, 8};
constexpr int kNumDotKernels = sizeof kDotRows / sizeof kDotRows[0];
constexpr int kMaxDotRows = kDotRows[kNumDotKernels - 1];

// out[0 .. last - first) = w[row, first .. last); first is a multiple of the block.
using DecodeKernel = void (*)(const Weight&, int64_t row, int64_t first, int64_t last, float* out);

// A DecodeKernel with results in bf16, rounded to nearest, ties to even; a NaN stays one.
using DecodeBf16Kernel = void (*)(const Weight&, int64_t row, int64_t first, int64_t last,
                                  uint16_t* out);

// The first kNumStepKernels of kDotRows have step kernels. Beyond 4 rows of x the multiply-adds
// bound a kernel, however W is decoded.
constexpr int kNumStepKernels = 4;
constexpr int kMaxStepRows = kDotRows[kNumStepKernels - 1];

// x [m, k] f32 as the step kernels for `rows` >= m rows take it, up to the last whole step of k.
struct ArrangeArgs {
  const float* x;
  int64_t x_stride;
  int64_t m, k;
  int64_t rows;
  float* out;
};
using ArrangeKernel = void (*)(const ArrangeArgs&);

// Dot kernels that take x in an order of their own (csrc/cpu/steps/): in steps of `values`,
// step_floats of each row, and beyond the last whole step as DotArgs has it. values is 0 where a
// format has none.
struct StepKernels {
  int values = 0, step_floats = 0;
  DotKernel dot[kNumStepKernels] = {};
  ArrangeKernel arrange = nullptr;
};

struct CodecKernels {
  DotKernel dot[kNumDotKernels];
  StepKernels steps;
  DecodeKernel decode;
  DecodeBf16Kernel decode_bf16;
};

// Values of K that are decoded at a time for a tile, and the distance of decoded rows in floats: a
// constant, so that the addresses of a tile's rows are immediates, and no multiple of 4 KiB, so
// that they spread over the sets of the first-level cache.
constexpr int64_t kDecodeK = 512;
constexpr int64_t kDecodeStride = kDecodeK + 16;

// c[r * c_stride + p * width + lane] (+)=
//     sum over k of w[r * kDecodeStride + k] x[p * x_stride + k * width + lane]
// for r < tile_rows, p < panels.
struct TileArgs {
  const float* w;
  const float* x;
  int64_t x_stride;
  int64_t k;
  float* c;
  int64_t c_stride;
  bool accumulate;
};
using TileKernel = void (*)(const TileArgs&);

constexpr int kMaxPanels = 4;

// The softmax of attention, in f32.
//
// The largest of n scores; -inf where there is none but NaN.
using TopKernel = float (*)(const float* scores, int64_t n);
// scores = exp(scores - top); returns their sum. top is at least every score.
using ExpKernel = float (*)(float* scores, int64_t n, float top);

// out[m * out_stride + d] += sum over t of p[m * p_stride + t] rows[t * row_stride + d], for d <
// dim, a multiple of kChunkValues, and as many m as the kernel is compiled for.
struct WeighArgs {
  const float* p;
  int64_t p_stride;
  const float* rows;
  int64_t row_stride;
  int64_t n, dim;
  float* out;
  int64_t out_stride;
};
using WeighKernel = void (*)(const WeighArgs&);

// The m for which it is compiled, by index: 1 << index.
constexpr int kNumWeighKernels = 4;

struct AttentionKernels {
  TopKernel top;
  ExpKernel exp;
  WeighKernel weigh[kNumWeighKernels];
};

// The kernels of a set are compiled in parts, each of the codecs of some headers of codecs/
// (isa.cpp).
struct IsaPart {
  CodecKernels codec[kNumCodecs];  // of other parts: without decode
};
constexpr int kIsaParts = 4;

struct IsaKernels {
  const char* name;
  int width;                    // floats per vector, columns of a panel
  int tile_rows;                // rows of W per tile
  int panels;                   // panels per tile, at most kMaxPanels
  TileKernel tile[kMaxPanels];  // by panels - 1
  AttentionKernels attention;
  const IsaPart*
      parts[kIsaParts + 1];  // the first that has a codec, and one for another set to add
  const CodecKernels& of(Codec codec) const {
    const int i = static_cast<int>(codec);
    const IsaPart* const* part = parts;
    while ((*part)->codec[i].decode == nullptr) ++part;
    return (*part)->codec[i];
  }
};

// The name of the i-th instruction set of those that this build holds and this machine runs, best
// first; null behind the last.
const char* isa_name(int i);

// The one in use: the best, or the one named by the environment variable METALMM_CPU_ISA.
// Throws std::invalid_argument when that names none of the available.
const IsaKernels& current_isa();

}  // namespace metalmm::cpu
