// The gated delta rule (Yang et al., arXiv:2412.06464): steps of a state S [k, n] of each head,
//     S = e^g S,   S = S + k (beta (v - k^T S))^T,   y = q^T S
// of q / |q| / sqrt(k) and k / |k|, g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).
//
// Row m of x, a position of a sequence, has q and k of kv_heads heads, fc_k values each, then v of
// `heads` heads, n values each. heads / kv_heads heads of v share q and k. x2 and c are rows of a
// and b, a value a head. y is [sequence, position, head, n]; f32, rounded once.
//
// Owner    a simdgroup owns kColumns columns of S of a head; a lane 4 of them in every kRowLanes-th
//          row, in registers through all positions.
// Traffic  S once there and once back; q and k n / kColumns times, but for once from the cache.
// Needs    fc_k at most kMostRows * kRowLanes; n a multiple of 4. Of 128 registers none spill at
//          fc_k = 128; at 256 132 bytes do (ptxas).
#pragma once

#include <metal_simdgroup>

#include "../entry.h"
#include "activation.h"

namespace metalmm {

template <class T>
struct GatedDelta {
  using G = GatedDeltaGeometry;

  struct From {
    device const T* x;
    device const T* a;
    device const T* b;
    device const T* a_log;
    device const T* dt_bias;
  };

  // A value for each head, f32 where fc_epilogue says so.
  static METAL_FUNC float of_head(device const T* values, uint head) {
    if (fc_epilogue & kDeltaFloatHeads) return reinterpret_cast<device const float*>(values)[head];
    return float(values[head]);
  }

  // The sum over the lanes of a column, in each of them.
  static METAL_FUNC float sum_rows(float v) {
    MM_UNROLL
    for (int lanes = G::kColumns / 4; lanes < kSimdWidth; lanes *= 2) {
      v += simd_shuffle_xor(v, ushort(lanes));
    }
    return v;
  }

  // The values of a row of x that belong to the rows of S of this lane; the sum of all squares.
  template <int kRows>
  static METAL_FUNC float load(device const T* x, uint first, thread float (&v)[kRows]) {
    float squares = 0.0f;
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint row = first + i * G::kRowLanes;
      v[i] = row < fc_k ? float(x[row]) : 0.0f;
      squares = fma(v[i], v[i], squares);
    }
    return sum_rows(squares);
  }

  template <int kRows>
  static METAL_FUNC void walk(From from, device T* y, device float4* state,
                              constant KernelArgs& args, uint sequence, uint head, uint column,
                              uint first) {
    const bool is_inside = column < args.n;
    float s[kRows][4];
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint row = first + i * G::kRowLanes;
      const float4 four = row < fc_k && is_inside ? state[ulong(row) * (args.n / 4)] : float4(0.0f);
      MM_UNROLL
      for (int c = 0; c < 4; ++c) s[i][c] = four[c];
    }
    const uint key = head / (args.heads / args.kv_heads);
    const float rate = exp(of_head(from.a_log, head)), bias = of_head(from.dt_bias, head);
    for (uint position = 0; position < args.positions; ++position) {
      const ulong m = ulong(sequence) * args.positions + position;
      device const T* x = from.x + m * args.x_stride;
      float q[kRows], k[kRows], memory[4] = {}, out[4] = {};
      const float q_scale = rsqrt(load(x + key * fc_k, first, q) + args.eps) * rsqrt(float(fc_k));
      const float k_scale = rsqrt(load(x + (args.kv_heads + key) * fc_k, first, k) + args.eps);
      const float decay = exp(-rate * softplus(float(from.a[m * args.x2_stride + head]) + bias));
      const float beta = sigmoid(float(from.b[m * args.y_stride + head]));
      MM_UNROLL
      for (int i = 0; i < kRows; ++i) {
        k[i] *= k_scale;
        MM_UNROLL
        for (int c = 0; c < 4; ++c) {
          s[i][c] *= decay;
          memory[c] = fma(s[i][c], k[i], memory[c]);
        }
      }
      device const T* v = x + 2 * args.kv_heads * fc_k + head * args.n + column;
      MM_UNROLL
      for (int c = 0; c < 4; ++c) {
        memory[c] = ((is_inside ? float(v[c]) : 0.0f) - sum_rows(memory[c])) * beta;
      }
      MM_UNROLL
      for (int i = 0; i < kRows; ++i) {
        MM_UNROLL
        for (int c = 0; c < 4; ++c) {
          s[i][c] = fma(k[i], memory[c], s[i][c]);
          out[c] = fma(s[i][c], q[i], out[c]);
        }
      }
      MM_UNROLL
      for (int c = 0; c < 4; ++c) out[c] = sum_rows(out[c]) * q_scale;
      if (first == 0 && is_inside) {
        device T* to = y + (m * args.heads + head) * args.n + column;
        MM_UNROLL
        for (int c = 0; c < 4; ++c) to[c] = T(out[c]);
      }
    }
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint row = first + i * G::kRowLanes;
      if (row < fc_k && is_inside) {
        state[ulong(row) * (args.n / 4)] = float4(s[i][0], s[i][1], s[i][2], s[i][3]);
      }
    }
  }

  static METAL_FUNC void run(From from, device T* y, device float* state, constant KernelArgs& args,
                             Position at) {
    const uint tiles = (args.n + G::kColumns - 1) / G::kColumns;
    const uint item = at.tg.x * (G::kThreads / kSimdWidth) + at.sg;
    const uint tile = item % tiles, head = item / tiles % args.heads;
    const uint sequence = item / tiles / args.heads;
    if (sequence >= args.m / args.positions) return;
    const uint column = tile * G::kColumns + at.lane % (G::kColumns / 4) * 4;
    const ulong of_head = (ulong(sequence) * args.heads + head) * fc_k * args.n;
    device float4* from_state = reinterpret_cast<device float4*>(state + of_head + column);
    const uint first = at.lane / (G::kColumns / 4);
    if (fc_k <= G::kRowLanes * G::kMostRows / 4) {
      walk<G::kMostRows / 4>(from, y, from_state, args, sequence, head, column, first);
    } else if (fc_k <= G::kRowLanes * G::kMostRows / 2) {
      walk<G::kMostRows / 2>(from, y, from_state, args, sequence, head, column, first);
    } else {
      walk<G::kMostRows>(from, y, from_state, args, sequence, head, column, first);
    }
  }
};

}  // namespace metalmm
