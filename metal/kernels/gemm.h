// gemm: y = x W^T; W is decoded into the registers of the matrix unit, once per tile of x.
//
// Owner    A threadgroup owns 32 rows of W (n) by fc_batch rows of x (m), 8, 16, ... or 64. A
//          simdgroup owns 8 rows of W by all of these: an 8 x 8 matrix of f32 sums for 8 rows of x.
//          It walks K in steps of 128 values, 16 products for each matrix of sums. Column c of W
//          and row c of x, in product 8 h + j, are value 32 (c / 2) + 16 h + 8 (c % 2) + j. (A sum
//          over K may take any order.)
//            W   a lane holds row r, columns 2 p and 2 p + 1: it decodes the 32 values from 32 p on
//            x   in threadgroup memory, as the lanes hold it (tile/panel.h), in stages: h of
//                halves, half of an h of floats. Two stages lie there: while one is multiplied,
//                the next is loaded, with one barrier a stage.
// Traffic  W is read M / fc_batch times, x N / 32 times, y is written once. Per 128 values of K a
//          lane decodes 32 weights, for 16 products for every 8 rows of x; for these it loads 4
//          vectors of x (8 of floats) and stores 1 (2).
// Cost     Issue cycles beside the 16 of a product: q4_0 1.9, q4_k 3.0 (docs/design.md).
// Needs    288 bytes of threadgroup memory for a row of x: two stages, 18 KB for 64 rows. Operands:
//          half for f16 x, which rounds W to 11 bits and reaches 65504; float for f32 and bf16 x.
//
// Rejected: decoded W in threadgroup memory, simdgroups of 32 x 16: 32 rows of x decode W twice as
// often as 64, and a product costs 0.9 loads of matrices more. 16 rows of W for a simdgroup halve
// the loads of x (0.1 cycles a product), and spill 160 bytes of 128 registers at 64 rows of x.
#pragma once

#include "../tile/mma.h"
#include "../tile/panel.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct Gemm {
  using Tile = GemmTile;
  using E = typename MatrixOperand<T>::type;
  using X = Panel<E>;
  using XRow = device const T*;
  static_assert(sizeof(E) == matrix_operand_bytes(is_same<T, half>::value), "see rounds_to_half");

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    const uint n = at.tg.y * Tile::kN + at.sg * kFragment, m = at.tg.x * fc_batch;
    const uint row = fragment_row(at.lane), column = fragment_column(at.lane);
    const Row w_row = weight_row<Format>(weight, args, n + row);
    XRow x_rows[kPieces][2];
    MM_UNROLL
    for (uint i = 0; i < kPieces; ++i) {
      x_rows[i][0] = x_row(x, args, m + 2 * pair_of(at, i));
      x_rows[i][1] = x_row(x, args, m + 2 * pair_of(at, i) + 1);
    }
    threadgroup uint4* panels = reinterpret_cast<threadgroup uint4*>(memory);
    const uint panel = fc_batch / 2 * X::kPairStride;

    simdgroup_float8x8 acc[1][Tile::kM / kFragment];
    clear(acc);
    const KRange range = k_of_part(args, at.tg.z);
    load_stage(x_rows, range.begin, 0, range.end, at, panels);
    for (uint k = range.begin; k < range.end; k += Tile::kK) {
      // A multiple of 32, visibly: both halves of a block are then read once.
      const uint first = (k + kValues * column) / kChunkValues * kChunkValues;
      MM_UNROLL
      for (uint h = 0; h < 2; ++h) {
        vec<E, 2> w[kValues / 2];
        load_pairs(w_row, first + h * kValues, range.end, w);
        MM_UNROLL
        for (uint part = 0; part < kStages / 2; ++part) {
          const uint stage = h * (kStages / 2) + part, next = (stage + 1) % kStages;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          const uint k_next = next == 0 ? k + Tile::kK : k;
          if (next != 0 || k_next < range.end) {
            load_stage(x_rows, k_next, next, range.end, at, panels + next % 2 * panel);
          }
          multiply(panels + stage % 2 * panel, row, column, w, part * X::kRun, acc[0]);
        }
      }
    }
    store_tile(result, args, at, m, n, acc);
  }

 private:
  MM_CONST int kValues = 16;  // values of K that a lane decodes at a time
  MM_CONST uint kStages = Tile::kK / (X::kRuns * X::kRun);
  MM_CONST uint kPairs = Tile::kThreads / X::kRuns;  // pairs of rows that threads load at a time
  MM_CONST uint kPieces = Tile::kM / 2 / kPairs;
  static_assert(kStages % 2 == 0, "the stages of a step end where they began");

  METAL_FUNC static uint pair_of(Position at, uint piece) {
    return at.index / X::kRuns + piece * kPairs;
  }

  // Stage `stage` of the step of K at k: run r begins at value 32 (r / 2) + 16 h + 8 (r % 2).
  static METAL_FUNC void load_stage(thread const XRow (&rows)[kPieces][2], uint k, uint stage,
                                    uint end, Position at, threadgroup uint4* panel) {
    const uint r = at.index % X::kRuns, parts = kStages / 2;
    const uint from = k + r / 2 * kChunkValues + r % 2 * kFragment + stage / parts * kValues +
                      stage % parts * X::kRun;
    MM_UNROLL
    for (uint i = 0; i < kPieces; ++i) {
      if (2 * pair_of(at, i) >= fc_batch) break;
      typename X::template Runs<T> runs;
      X::load_run(rows[i][0], from, end, runs.words[0]);
      X::load_run(rows[i][1], from, end, runs.words[1]);
      X::store(X::lane_of(panel, pair_of(at, i), r), runs);
    }
  }

  // w[j] = values j and 8 + j of the 16 at k: a lane's two columns of product j.
  static METAL_FUNC void load_pairs(Row row, uint k, uint end, thread vec<E, 2> (&w)[kValues / 2]) {
    E all[kValues];
    load_weights<Format>(row, k, end, all);
    MM_UNROLL
    for (uint j = 0; j < kValues / 2; ++j) {
      w[j].x = all[j];
      w[j].y = all[kValues / 2 + j];
    }
  }

  // acc += 8 rows of W * fc_batch rows of x, over a stage; w[first] belongs to its first product.
  static METAL_FUNC void multiply(threadgroup uint4* panel, uint row, uint column,
                                  thread const vec<E, 2> (&w)[kValues / 2], uint first,
                                  thread simdgroup_float8x8 (&acc)[Tile::kM / kFragment]) {
    MM_UNROLL
    for (uint b = 0; b < Tile::kM / kFragment; ++b) {
      if (b * kFragment >= fc_batch) break;
      // Costs nothing on Apple's GPUs; without it ptxas loads the x of all products first.
      simdgroup_barrier(mem_flags::mem_none);
      vec<E, 2> xs[X::kRun];
      X::load(X::lane_of(panel, b * (kFragment / 2) + column / 2, row), xs);
      MM_UNROLL
      for (uint j = 0; j < X::kRun; ++j) {
        simdgroup_multiply_accumulate(acc[b], fragment_of(w[first + j]), fragment_of(xs[j]),
                                      acc[b]);
      }
    }
  }
};

}  // namespace metalmm
