// Panels: rows of x in threadgroup memory, laid out as a simdgroup's fragments of them.
//
// A stage of a panel is 8 runs of kRun values of K. Product j of a stage multiplies value j of
// every run: row r of the x matrix is value j of run r, so a lane, which holds row r and columns 2
// q and 2 q + 1, reads run r of two neighbouring rows of x: 32 bytes for kRun products, in pairs as
// the matrix unit takes them.
//
//     32 bytes   x[2 q][run + 0], x[2 q + 1][run + 0], x[2 q][run + 1], x[2 q + 1][run + 1], ...
//
// The 32 bytes lie as two vectors in two planes of 8 runs: a load of 8 lanes that are neighbours on
// an NVIDIA GPU touches every bank once, and one of Apple's 32 lanes each bank equally often.
#pragma once

#include <metal_stdlib>

#include "load.h"

namespace metalmm {

using namespace metal;

template <class E>
struct Panel {
  MM_CONST int kRun = panel_run(sizeof(E)), kRuns = kFragment;
  using Lane = threadgroup uint4*;  // the first vector of a lane's pair of rows and run

  // Vectors from a pair of rows to the next.
  MM_CONST int kPairStride = panel_pair_bytes() / 16;

  // The runs r of two rows as they lie in device memory: `words` of each.
  template <class T>
  struct Runs {
    MM_CONST int kWords = kRun * sizeof(T) / 4;
    uint words[2][kWords];

    METAL_FUNC T value(uint row, uint j) const thread {
      if constexpr (sizeof(T) == 4) {
        return as_type<T>(words[row][j]);
      } else {
        return as_type<vec<T, 2>>(words[row][j / 2])[j % 2];
      }
    }
  };

  // A run at k of a row of x, zero from `end` on.
  template <class T>
  static METAL_FUNC void load_run(device const T* row, uint k, uint end,
                                  thread uint (&words)[Runs<T>::kWords]) {
    constexpr int kWords = Runs<T>::kWords;
    if (x_is_aligned() && (!has_k_tail() || k + kRun <= end)) {
      const vec<uint, kWords> all = *reinterpret_cast<device const vec<uint, kWords>*>(row + k);
      MM_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = all[i];
      return;
    }
    T x[kRun];
    load_x(row, k, end, x);
    MM_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = as_type<uint>(x[i]);
      } else {
        vec<T, 2> pair;
        pair.x = x[2 * i];
        pair.y = x[2 * i + 1];
        words[i] = as_type<uint>(pair);
      }
    }
  }

  static METAL_FUNC Lane lane_of(threadgroup uint4* panel, uint pair, uint run) {
    return panel + pair * kPairStride + run;
  }

  template <class T>
  static METAL_FUNC void store(Lane to, thread const Runs<T>& runs) {
    E pairs[2 * kRun];
    MM_UNROLL
    for (uint j = 0; j < kRun; ++j) {
      pairs[2 * j] = E(runs.value(0, j));
      pairs[2 * j + 1] = E(runs.value(1, j));
    }
    to[0] = packed<E>(pairs);
    to[kRuns] = packed<E>(pairs + kRun);
  }

  // A lane's part of the matrices of kRun products.
  static METAL_FUNC void load(Lane from, thread vec<E, 2> (&x)[kRun]) {
    MM_UNROLL
    for (int half_run = 0; half_run < 2; ++half_run) {
      const uint4 words = from[half_run * kRuns];
      MM_UNROLL
      for (int j = 0; j < kRun / 2; ++j) {
        thread vec<E, 2>& pair = x[half_run * (kRun / 2) + j];
        if constexpr (sizeof(E) == 4) {
          pair.x = as_type<E>(words[2 * j]);
          pair.y = as_type<E>(words[2 * j + 1]);
        } else {
          pair = as_type<vec<E, 2>>(words[j]);
        }
      }
    }
  }
};

}  // namespace metalmm
