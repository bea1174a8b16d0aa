// The tile constants of every strategy, read by the shaders and by plan(): nothing is restated on either side.
#pragma once

namespace metalmm {

constexpr int kSimdWidth = 32;
constexpr int kChunkValues = 32;  // every block of every format is a whole number of chunks

// gemv and gemv_batched: rows of W per simdgroup, simdgroups per threadgroup. A simdgroup owns its rows and
// walks all of K. The variants are rows of strategies.def, not copies of the kernel.
struct GemvStandard { static constexpr int kRows = 4, kSimdgroups = 4; };
struct GemvLargeK { static constexpr int kRows = 4, kSimdgroups = 8; };   // simdgroups share rows, split K
struct GemvWideN { static constexpr int kRows = 8, kSimdgroups = 4; };

// gemm: one threadgroup computes kN rows of W by kM rows of x, kK values of K at a time, with
// kSimdgroups simdgroups of 8 x 8 matrices.
struct GemmTile { static constexpr int kN = 64, kM = 32, kK = 32, kSimdgroups = 4; };
struct GemmSmallTile { static constexpr int kN = 64, kM = 8, kK = 32, kSimdgroups = 4; };

// gemm_tiled: threadgroup memory, no matrix unit. One thread owns kPerThread x kPerThread results.
struct GemmTiledTile { static constexpr int kN = 32, kM = 32, kK = 32, kPerThread = 2; };

constexpr int kNaiveThreads = 64;      // gemm_naive, gemv_naive: one thread per result
constexpr int kCopyThreads = 256;      // embedding, dequantize, elementwise, split-K reduction
constexpr int kMaxBatch = 16;          // gemv_batched: most rows of x, in passes of at most kBatchPerPass
constexpr int kBatchPerPass = 8;

}  // namespace metalmm
