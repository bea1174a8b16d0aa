// gemm: y = x W^T by 8 x 8 matrices; W is decoded into threadgroup memory, once per tile.
//
// Owner    A threadgroup owns 64 rows of W (n) by 32 rows of x (m). A simdgroup owns 32 x 16 of
//          them: 4 x 2 matrices of f32 sums, in registers.
//                       m 0..15   16..31
//            n  0..31     sg 0     sg 2
//            n 32..63     sg 1     sg 3
//          Per step a thread decodes 32 values of one row of W and loads 16 of one row of x,
//          half as many where operands are floats.
// Traffic  W is read M / 32 times, x N / 64 times, y is written once. Per 32 values of K a thread
//          stores 16 + 8 operands (2 + 1 vectors of halves, 4 + 2 of floats), and a simdgroup loads
//          16 matrices of W and 8 of x for 32 multiplications.
// Cost     Per weight of q4_0 2 bitwise, 2 fma, 1.4 shifts and conversions and 0.4 selects (clang
//          22, f32 x; f16 x: 0.8 bitwise, 1 fma and 1 product of halves, 0.1 shifts); then 0.4
//          stores of operands (halves: 0.2), 1.5 loads and 2 multiplications of matrices. Loads of
//          W by a thread for its 32 weights of a step, where rows are read 8 bytes at a time
//          (Window): 3 of q4_0, 5 of q8_0, 13 of q6_k; 4 bytes at a time 5, 10 and 23; 2 bytes at
//          a time 9, 17 and 35.
// Needs    (64 + 32) rows of a step in threadgroup memory, of 72 halves or 40 floats. Half
//          operands, for f16 x, round W to 11 bits and reach 65504; f32 and bf16 x multiply float
//          operands.
#pragma once

#include "../tile/load.h"
#include "../tile/mma.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct Gemm {
  using Tile = GemmTile;
  using E = typename MatrixOperand<T>::type;
  static_assert(sizeof(E) == matrix_operand_bytes(is_same<T, half>::value),
                "see threadgroup_bytes");

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    constexpr int kStride = kStep + kOperandPad;
    constexpr uint kWLoaders = kStep / kWValues;  // threads of a row
    constexpr uint kXLoaders = Tile::kThreads / Tile::kM;
    constexpr uint kXValues = kStep / kXLoaders;
    threadgroup E* w_operands = reinterpret_cast<threadgroup E*>(memory);
    threadgroup E* x_operands = w_operands + Tile::kN * kStride;

    const uint n = at.tg.y * Tile::kN, m = at.tg.x * Tile::kM;
    const uint w_line = at.index / kWLoaders, w_k = at.index % kWLoaders * kWValues;
    const uint x_line = at.index / kXLoaders, x_k = at.index % kXLoaders * kXValues;
    const Row w_from = weight_row<Format>(weight, args, n + w_line);
    device const T* x_from = x_row(x, args, m + x_line);
    const uint sg_n = at.sg % 2 * (Tile::kN / 2), sg_m = at.sg / 2 * (Tile::kM / 2);

    simdgroup_float8x8 acc[Tile::kN / 2 / kFragment][Tile::kM / 2 / kFragment];
    clear(acc);
    const KRange range = k_of_part(args, at.tg.z);
    for (uint k = range.begin; k < range.end; k += kStep) {
      E w[kWValues / 16][16];
      E xs[kXValues];
      // A multiple of kWValues, visibly: both halves of a block are then read once.
      const uint first = (k + w_k) / kWValues * kWValues;
      MM_UNROLL
      for (uint i = 0; i < kWValues / 16; ++i) {
        load_weights<Format>(w_from, first + 16 * i, range.end, w[i]);
      }
      load_x(x_from, k + x_k, range.end, xs);
      MM_UNROLL
      for (uint i = 0; i < kWValues / 16; ++i) {
        store_operands(w_operands + w_line * kStride + w_k + 16 * i, w[i]);
      }
      store_operands(x_operands + x_line * kStride + x_k, xs);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply<kStep>(w_operands + sg_n * kStride, x_operands + sg_m * kStride, acc);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    store_tile(result, args, at, m + sg_m, n + sg_n, acc);
  }

 private:
  MM_CONST int kStep = Tile::step(is_same<T, half>::value);
  MM_CONST uint kWValues = Tile::kN * kStep / Tile::kThreads;
};

}  // namespace metalmm
