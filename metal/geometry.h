// The geometry of every strategy, read by the shaders and by plan(): nothing is restated on
// either side.
#pragma once

// A constant of a namespace or of a struct. Metal rejects one outside the constant address space;
// constexpr variables of a function need no macro.
#if defined(__METAL_VERSION__)
#define MM_CONST static constant constexpr const
#else
#define MM_CONST static constexpr
#endif

namespace metalmm {

MM_CONST int kSimdWidth = 32;
MM_CONST int kChunkValues = 32;         // every block of every format is a whole number of chunks
MM_CONST int kAffineRowAlignment = 16;  // rows of affine formats are padded to multiples of it
MM_CONST int kFragment = 8;             // rows and columns of a simdgroup matrix

// The members of a Matmul strategy's geometry that plan() reads:
//   kN, kM, kK      rows of W and of x that a threadgroup owns, values of K that it takes at a time
//   kTakesBatch     kM is the most: kConstantBatch says how many rows of x, as batch_of() decides
//                   for M rows and pieces of so many values
//   kOnMatrixUnit   multiplies 8 x 8 matrices
//   kThreads, threadgroup_bytes()   of a threadgroup
//   kBytesPerRow    with kTakesBatch: threadgroup memory for each row of x of kConstantBatch, or 0
//                   where threadgroup_bytes() is for all of them

// The gemv strategies: a simdgroup owns kRows rows of W and walks all of K; with kShareRows the
// simdgroups of a threadgroup own the same rows and split K between them. A threadgroup owns kN
// rows of W and kM rows of x (gemv_batched: kM or fewer, by kConstantBatch). The variants are rows
// of strategies.def, not copies of the kernel. Threadgroups as those of gemm, below.

MM_CONST int kCodebookBytes = 1024;  // value pairs by code byte, for formats with a codebook
MM_CONST int kBatchPerPass = 8;      // gemv_batched: most rows of x a pass
MM_CONST int kMaxBatch = 16;         // gemv_batched: most rows of x

// gemv_batched: rows of W decoded before x is read, by the values of a lane's piece (formats.def).
// More rows read x less often and need more registers.
constexpr int batched_rows(int piece_values) { return piece_values <= 16 ? 4 : 2; }
// And the most rows of x a pass: beside pieces of 32 values of W and x, the sums of 8 are over the
// 128 registers that a lane of an Apple GPU has.
constexpr int batched_pass(int piece_values) {
  return piece_values <= 16 ? kBatchPerPass : kBatchPerPass / 2;
}

// Rows of x a pass whose pieces of more than 16 values stay in registers, for all rows of W.
MM_CONST int kKeptRows = 2;

template <int rows, int simdgroups, bool share_rows = false, int batch = 1>
struct GemvGeometry {
  MM_CONST int kRows = rows, kSimdgroups = simdgroups;
  MM_CONST bool kShareRows = share_rows;
  MM_CONST int kN = share_rows ? rows : rows * simdgroups, kM = batch, kK = kChunkValues;
  MM_CONST bool kTakesBatch = batch > 1, kOnMatrixUnit = false;
  MM_CONST int kBytesPerRow = 0;
  MM_CONST int kThreads = simdgroups * kSimdWidth;
  static constexpr int threadgroup_bytes(bool) {
    return kCodebookBytes + (share_rows ? simdgroups * (rows + 1) * 4 : 0);
  }
  // M spread evenly over its passes.
  template <class Int>
  static constexpr Int batch_of(Int m, bool, int piece_values) {
    const Int passes = (m + batched_pass(piece_values) - 1) / batched_pass(piece_values);
    return (m + passes - 1) / passes;
  }
};
using GemvStandard = GemvGeometry<4, 4>;
using GemvLargeK = GemvGeometry<4, 8, true>;
using GemvWideN = GemvGeometry<8, 2>;
using GemvBatched = GemvGeometry<4, 4, false, kBatchPerPass>;
using GemvCoalesced = GemvGeometry<1, 4>;
using SwigluUp = GemvGeometry<2, 4>;  // as many rows of gate as of up

// The four gemm strategies. A threadgroup owns kN rows of W by kM rows of x and takes kK values of
// K at a time. Threadgroups: x tiles of M, y tiles of N, z parts of K; M varies fastest, so that
// the threadgroups that run together read few rows of W, the larger operand.

// Threadgroup rows are kOperandPad elements longer than a step: eight rows of halves then start in
// eight different banks, of floats in four, and 16-byte vectors stay aligned.
MM_CONST int kOperandPad = 8;

// Bytes of an operand of gemm in threadgroup memory. f16 activations multiply halves (weights
// rounded to 11 bits); f32 and bf16 activations multiply floats, in which both operands are exact.
constexpr int matrix_operand_bytes(bool x_is_f16) { return x_is_f16 ? 2 : 4; }

// Whether W is rounded to half before it meets x.
template <class Geometry>
constexpr bool rounds_to_half(bool x_is_f16) {
  return Geometry::kOnMatrixUnit && matrix_operand_bytes(x_is_f16) == 2;
}

// A panel of x (tile/panel.h): values of K of a row that lie together, 16 bytes of operands, and
// the bytes of two rows of x in a stage of 8 runs. The 32 bytes more shift a pair by 8 banks.
constexpr int panel_run(int operand_bytes) { return 16 / operand_bytes; }
constexpr int panel_pair_bytes() { return kFragment * 2 * 16 + 32; }

// Rows of a tile, at most `most`: M spread evenly over the tiles, in whole fragments.
template <class Int>
constexpr Int even_tiles(Int m, Int most) {
  const Int tiles = (m + most - 1) / most, rows = (m + tiles - 1) / tiles;
  return (rows + kFragment - 1) / kFragment * kFragment;
}

// gemm: a simdgroup has 8 rows of W, decoded into its registers, by all rows of x of the tile,
// which lie in threadgroup memory, two stages of them.
struct GemmTile {
  MM_CONST int kSimdgroups = 4, kN = kSimdgroups * kFragment, kM = 64, kK = 128;
  MM_CONST bool kTakesBatch = true, kOnMatrixUnit = true;
  MM_CONST int kThreads = kSimdgroups * kSimdWidth;
  MM_CONST int kBytesPerRow = 2 * panel_pair_bytes() / 2;  // a row of x: two stages of half a pair
  static constexpr int threadgroup_bytes(bool) { return kM * kBytesPerRow; }
  template <class Int>
  static constexpr Int batch_of(Int m, bool, int) {
    return even_tiles(m, Int(kM));
  }
};

// gemm_small: the simdgroups own the same kN rows of W and share K, each decodes into registers. Up
// to kM rows of halves, 8 of floats: 16 of floats spill 0.4 to 1.9 KB at the 128 registers that a
// lane of an Apple GPU has. More than 8 are read in an order of their own (tile/arranged.h), which
// a pass before it writes.
struct GemmSmallTile {
  MM_CONST int kN = 16, kM = 32, kK = 128, kSimdgroups = 4;
  MM_CONST bool kTakesBatch = true, kOnMatrixUnit = true;
  static constexpr int rows(bool x_is_f16) { return x_is_f16 ? kM : kFragment; }
  MM_CONST int kThreads = kSimdgroups * kSimdWidth;
  MM_CONST int kBytesPerRow = kSimdgroups * kN * 4;  // f32 sums for a row of x
  static constexpr int threadgroup_bytes(bool x_is_f16) { return rows(x_is_f16) * kBytesPerRow; }
  template <class Int>
  static constexpr Int batch_of(Int m, bool x_is_f16, int) {
    return even_tiles(m, Int(rows(x_is_f16)));
  }
};

// gemm_tiled: floats in threadgroup memory, no matrix unit. One thread owns kPerThread x
// kPerThread results.
struct GemmTiledTile {
  MM_CONST int kN = 32, kM = 32, kK = 32, kPerThread = 2;
  MM_CONST bool kTakesBatch = false, kOnMatrixUnit = false;
  MM_CONST int kThreads = kN * kM / (kPerThread * kPerThread);
  MM_CONST int kStride = kK + 1;  // odd: a column of operands lies in 32 different banks
  static constexpr int threadgroup_bytes(bool) { return (kN + kM) * kStride * 4; }
};

MM_CONST int kNaiveThreads = 64;  // gemm_naive: one thread per result
struct GemmNaiveTile {            // threads along N; one row of x per threadgroup
  MM_CONST int kN = kNaiveThreads, kM = 1, kK = 16;
  MM_CONST bool kTakesBatch = false, kOnMatrixUnit = false;
  MM_CONST int kThreads = kNaiveThreads;
  static constexpr int threadgroup_bytes(bool) { return 0; }
};

// Flat grids of ceil(items / kThreads) threadgroups; an item is kValues values, and a row is
// ceil(K / kValues) items.
MM_CONST int kCopyThreads = 256;
template <int values>
struct FlatGeometry {
  MM_CONST int kValues = values, kThreads = kCopyThreads;
};
using DecodeItems = FlatGeometry<16>;   // embedding (count rows), dequantize (N rows)
using ResultItems = FlatGeometry<1>;    // split_reduce: M * N items
using ArrangeItems = FlatGeometry<16>;  // arrange_x: bytes of x of whole steps and tiles
using ProbeItems = FlatGeometry<4>;     // elementwise, act_mul: ceil(count / 4) items

// rms_norm and add_rms_norm: a threadgroup a row.
struct NormGeometry {
  MM_CONST int kThreads = 512;
  MM_CONST int kThreadgroupBytes = kThreads / kSimdWidth * 4;
};

// rope, rope_append: a simdgroup a head; an item is a lane of it.
struct HeadLanes {
  MM_CONST int kValues = 1, kThreads = 4 * kSimdWidth;
};

// hadamard: a thread a value, a simdgroup the kHadamardValues values that are rotated together.
using HadamardItems = FlatGeometry<1>;
MM_CONST int kHadamardValues = kSimdWidth;
MM_CONST float kHadamardScale = 0.17677669529663687f;  // 1 / sqrt(32)

// rope_tables: a thread a frequency of a position, an item.
using TableItems = FlatGeometry<1>;

// route: a simdgroup a token; an item is a lane of it. A lane has a choice, and a group.
struct RouteGeometry {
  MM_CONST int kValues = 1, kThreads = 4 * kSimdWidth, kMost = kSimdWidth;
};
MM_CONST float kRouteLeast = 1e-20f;  // added to a sum of chosen scores

// gated_delta: a threadgroup kGroupColumns columns of the state of a head, a simdgroup kColumns of
// them, 4 a lane in 4 of every 4 kRowLanes rows; kPositions positions in threadgroup memory. 16
// columns instead of 8 leave 256 simdgroups for 32 heads of 128.
struct GatedDeltaGeometry {
  MM_CONST int kValues = 1, kThreads = 4 * kSimdWidth;
  MM_CONST int kColumns = 8, kMostRows = 16, kPositions = 8;
  MM_CONST int kRowLanes = kSimdWidth / (kColumns / 4);
  MM_CONST int kGroupColumns = kColumns * (kThreads / kSimdWidth);
  // Bytes for heads of k values of `size` bytes each.
  static constexpr int threadgroup_bytes(int k, int size) {
    return kPositions * (16 + (2 * ((k + 3) / 4 * 4) + kGroupColumns) * size);
  }
};

// ssm_scan: a threadgroup kGroupRows rows of the state of a head, a simdgroup kRows of them,
// kLaneRows a lane; kRowLanes lanes a row, 4 values each of every 4 kRowLanes; kPositions positions
// in threadgroup memory.
struct SsmScanGeometry {
  MM_CONST int kValues = 1, kThreads = 4 * kSimdWidth;
  MM_CONST int kLaneRows = 4, kRowLanes = 16, kMostValues = 256, kPositions = 8;
  MM_CONST int kRows = kLaneRows * (kSimdWidth / kRowLanes);
  MM_CONST int kGroupRows = kRows * (kThreads / kSimdWidth);
  // Bytes for k values of b and of c of `size` bytes each.
  static constexpr int threadgroup_bytes(int k, int size) {
    return kPositions * (16 + 4 * kGroupRows + (2 * k + kGroupRows) * size);
  }
};

// causal_conv: a thread so many positions of a channel, an item.
struct CausalConvGeometry {
  MM_CONST int kValues = 1, kThreads = 4 * kSimdWidth;
  MM_CONST int kPositions = 32, kMostTaps = 8;
};

// ---- attention: a part of the slots that the queries see, for rows of q of one head of keys. Rows
// are numbered by head of q, then by query.

MM_CONST int kMaxHeadValues = 256;
MM_CONST int kHeadStep = 16;  // a head is a whole number of so many values

// Slots of a part. The size follows from what is seen alone: results do not depend on how large the
// cache is, nor on other sequences. At most kMaxParts parts.
MM_CONST int kMinPartSlots = 64, kMaxParts = 64;
template <class Int>
constexpr Int part_slots(Int seen) {
  const Int even = (seen + kMaxParts - 1) / kMaxParts;
  return even > kMinPartSlots ? (even + 31) / 32 * 32 : kMinPartSlots;
}

// attention_split: a simdgroup has 4 slots a group of lanes at a time, a lane 8 values of each.
struct AttentionSplitGeometry {
  MM_CONST int kRows = 4, kSimdgroups = 4;
  MM_CONST int kThreads = kSimdgroups * kSimdWidth;
  // Most rows of q of a head of keys. Beyond, their matrices pay for padding them.
  MM_CONST int kMostRows = 4 * kRows;
  // Sums, largest score and sum of weights of every simdgroup.
  static constexpr int threadgroup_bytes(int k, int rows) {
    return rows * (k + 2) * kSimdgroups * 4;
  }
};

// attention_tile: a simdgroup has 8 rows of q; kSlots slots a step, of which kStep values of each
// row lie in threadgroup memory at a time.
struct AttentionTileGeometry {
  MM_CONST int kSimdgroups = 4, kRows = kSimdgroups * kFragment, kSlots = 32, kStep = 64;
  MM_CONST int kThreads = kSimdgroups * kSimdWidth;
  static constexpr int threadgroup_bytes(bool x_is_f16) {
    return (kRows + kSlots) * (kStep + kOperandPad) * matrix_operand_bytes(x_is_f16);
  }
};

// attention_join: a threadgroup a row of q, a simdgroup every 4th part.
struct AttentionJoinGeometry {
  MM_CONST int kSimdgroups = 4, kThreads = kSimdgroups * kSimdWidth;
  MM_CONST int kLoads = 4;                                    // loads of a lane at a time
  MM_CONST int kMostSums = kSimdgroups * kMaxHeadValues / 4;  // float4, of all simdgroups
  MM_CONST int kThreadgroupBytes = (4 * kMostSums + kMaxParts) * 4;
};

// dot: one threadgroup.
struct DotGeometry {
  MM_CONST int kThreads = kCopyThreads;
  MM_CONST int kThreadgroupBytes = kThreads / kSimdWidth * 4;
};

}  // namespace metalmm
