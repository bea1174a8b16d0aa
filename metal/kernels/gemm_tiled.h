// gemm_tiled: y = x W^T with operands in threadgroup memory and no matrix unit: what decoding a
// weight once for 32 rows of x gains over gemm_naive.
//
// Owner    A threadgroup owns 32 rows of W (n) by 32 rows of x (m). Thread t of 256 owns 2 x 2
//          results, 16 apart: n = t % 16 + {0, 16}, m = t / 16 + {0, 16}. Per 32 values of K the
//          first 64 threads decode 16 values of W each, and every thread loads 4 of x.
// Traffic  W is read M / 32 times, x N / 32 times. Per value of K a thread reads 2 + 2 operands
//          from threadgroup memory for 4 fma.
// Cost     A weight is decoded once for 32 fma, each of which reads one operand of its own.
// Needs    (32 + 32) * 33 floats of threadgroup memory.
#pragma once

#include "../tile/load.h"
#include "../tile/store.h"

namespace metalmm {

template <class Format, class T>
struct GemmTiled {
  using Tile = GemmTiledTile;

  static METAL_FUNC void run(device const T* x, device const uchar* weight, Result<T> result,
                             constant KernelArgs& args, threadgroup float4* memory, Position at) {
    constexpr int kOwn = Tile::kPerThread, kStride = Tile::kStride;
    constexpr uint kColumns = Tile::kN / kOwn;  // threads along n
    threadgroup float* w_operands = reinterpret_cast<threadgroup float*>(memory);
    threadgroup float* x_operands = w_operands + Tile::kN * kStride;
    const uint n = at.tg.y * Tile::kN, m = at.tg.x * Tile::kM;
    const uint own_n = at.index % kColumns, own_m = at.index / kColumns;

    float acc[kOwn][kOwn] = {};
    const KRange range = k_of_part(args, at.tg.z);
    for (uint k = range.begin; k < range.end; k += Tile::kK) {
      load_operands(x, weight, args, w_operands, x_operands, at.index, m, n, k, range.end);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = 0; i < Tile::kK; ++i) {
        float w[kOwn], xs[kOwn];
        MM_UNROLL
        for (int j = 0; j < kOwn; ++j) {
          w[j] = w_operands[(own_n + j * kColumns) * kStride + i];
          xs[j] = x_operands[(own_m + j * kColumns) * kStride + i];
        }
        MM_UNROLL
        for (int a = 0; a < kOwn; ++a) {
          MM_UNROLL
          for (int b = 0; b < kOwn; ++b) acc[a][b] = fma(w[a], xs[b], acc[a][b]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    MM_UNROLL
    for (uint a = 0; a < kOwn; ++a) {
      MM_UNROLL
      for (uint b = 0; b < kOwn; ++b) {
        store_inside(result, args, at.tg.z, m + own_m + b * kColumns, n + own_n + a * kColumns,
                     acc[a][b]);
      }
    }
  }

 private:
  static METAL_FUNC void load_operands(device const T* x, device const uchar* weight,
                                       constant KernelArgs& args, threadgroup float* w_operands,
                                       threadgroup float* x_operands, uint thread_index, uint m,
                                       uint n, uint k, uint end) {
    constexpr int kStride = Tile::kStride;
    constexpr uint kWLoaders = Tile::kK / 16;  // threads of a row
    constexpr uint kXLoaders = Tile::kThreads / Tile::kM;
    constexpr uint kXValues = Tile::kK / kXLoaders;
    if (thread_index < Tile::kN * kWLoaders) {
      const uint line = thread_index / kWLoaders, at = thread_index % kWLoaders * 16;
      float w[16];
      load_weights<Format>(weight_row<Format>(weight, args, n + line), k + at, end, w);
      MM_UNROLL
      for (uint i = 0; i < 16; ++i) w_operands[line * kStride + at + i] = w[i];
    }
    const uint line = thread_index / kXLoaders, at = thread_index % kXLoaders * kXValues;
    float xs[kXValues];
    load_x(x_row(x, args, m + line), k + at, end, xs);
    MM_UNROLL
    for (uint i = 0; i < kXValues; ++i) x_operands[line * kStride + at + i] = xs[i];
  }
};

}  // namespace metalmm
