// A selective state space with a decay for each head (Mamba-2: Dao and Gu, arXiv:2405.21060): steps
// of a state S [n, k] of each head,
//     S = e^(-t exp(a_log)) S + t x b^T,   y = (S c + d x) silu(gate)
// of t = softplus(dt + dt_bias), at least alpha and at most beta.
//
// Row m of x, a position of a sequence, has x of `heads` heads, n values each, then b and then c of
// kv_heads groups, fc_k values each. heads / kv_heads heads share b and c. x2 are rows of dt, a
// value a head, c of the slots rows of a gate as y is: [sequence, position, head, n]; f32, rounded
// once.
//
// Owner    a simdgroup owns kRows rows of S of a head; a lane 4 values of every 4 kRowLanes of
//          kLaneRows rows, in registers through all positions.
// Traffic  S once there and once back; b and c n / kRows times, but for once from the cache.
// Needs    fc_k at most kMostValues and a multiple of 4. Of 128 registers none spill at fc_k = 128;
//          at 256 12 bytes do (ptxas).
#pragma once

#include <metal_simdgroup>

#include "../entry.h"
#include "activation.h"

namespace metalmm {

template <class T>
struct SsmScan {
  using G = SsmScanGeometry;

  struct From {
    device const T* x;
    device const T* dt;
    device const T* gate;
    device const T* a_log;
    device const T* dt_bias;
    device const T* d;
  };

  // A value for each head, f32 where fc_epilogue says so.
  static METAL_FUNC float of_head(device const T* values, uint head) {
    if (fc_epilogue & kSsmFloatHeads) return reinterpret_cast<device const float*>(values)[head];
    return float(values[head]);
  }

  // The sum over the lanes of a row, in each of them.
  static METAL_FUNC float sum_row(float v) {
    MM_UNROLL
    for (int lanes = 1; lanes < G::kRowLanes; lanes *= 2) {
      v += simd_shuffle_xor(v, ushort(lanes));
    }
    return v;
  }

  // The values of b or of c that belong to this lane.
  template <int kValues>
  static METAL_FUNC void load(device const T* from, uint first, thread float (&v)[kValues]) {
    MM_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const uint at = first + i / 4 * (4 * G::kRowLanes) + i % 4;
      v[i] = at < fc_k ? float(from[at]) : 0.0f;
    }
  }

  // Rows `row` and behind of S of a head; `first` is the first value of this lane in each.
  template <int kValues>
  static METAL_FUNC void walk(From from, device T* y, device float* state,
                              constant KernelArgs& args, uint sequence, uint head, uint row,
                              uint first) {
    float s[G::kLaneRows][kValues];
    MM_UNROLL
    for (int r = 0; r < G::kLaneRows; ++r) {
      device const float4* fours =
          reinterpret_cast<device const float4*>(state + ulong(row + r) * fc_k + first);
      MM_UNROLL
      for (int i = 0; i < kValues; i += 4) {
        const bool is_inside = row + r < args.n && first + i * G::kRowLanes < fc_k;
        const float4 four = is_inside ? fours[i / 4 * G::kRowLanes] : float4(0.0f);
        MM_UNROLL
        for (int c = 0; c < 4; ++c) s[r][i + c] = four[c];
      }
    }
    const uint group = head / (args.heads / args.kv_heads);
    const float rate = exp(of_head(from.a_log, head)), bias = of_head(from.dt_bias, head);
    const float d = of_head(from.d, head);
    for (uint position = 0; position < args.positions; ++position) {
      const ulong m = ulong(sequence) * args.positions + position;
      device const T* x = from.x + m * args.x_stride;
      device const T* of_group = x + args.heads * args.n + group * fc_k;
      float b[kValues], c[kValues];
      load(of_group, first, b);
      load(of_group + args.kv_heads * fc_k, first, c);
      const float open = softplus(float(from.dt[m * args.x2_stride + head]) + bias);
      const float dt = min(max(open, args.alpha), args.beta), decay = exp(-rate * dt);
      MM_UNROLL
      for (int r = 0; r < G::kLaneRows; ++r) {
        const uint value = head * args.n + row + r;
        const bool is_inside = row + r < args.n;
        const float of_x = is_inside ? float(x[value]) : 0.0f, scaled = dt * of_x;
        float sum = 0.0f;
        MM_UNROLL
        for (int i = 0; i < kValues; ++i) {
          s[r][i] = fma(scaled, b[i], s[r][i] * decay);
          sum = fma(s[r][i], c[i], sum);
        }
        sum = fma(d, of_x, sum_row(sum));
        if (first == 0 && is_inside) {
          if (fc_epilogue & kSsmGate) sum *= silu(float(from.gate[m * args.y_stride + value]));
          y[m * args.heads * args.n + value] = T(sum);
        }
      }
    }
    MM_UNROLL
    for (int r = 0; r < G::kLaneRows; ++r) {
      device float4* fours =
          reinterpret_cast<device float4*>(state + ulong(row + r) * fc_k + first);
      MM_UNROLL
      for (int i = 0; i < kValues; i += 4) {
        if (row + r >= args.n || first + i * G::kRowLanes >= fc_k) continue;
        fours[i / 4 * G::kRowLanes] = float4(s[r][i], s[r][i + 1], s[r][i + 2], s[r][i + 3]);
      }
    }
  }

  static METAL_FUNC void run(From from, device T* y, device float* state, constant KernelArgs& args,
                             Position at) {
    const uint tiles = (args.n + G::kRows - 1) / G::kRows;
    const uint item = at.tg.x * (G::kThreads / kSimdWidth) + at.sg;
    const uint tile = item % tiles, head = item / tiles % args.heads;
    const uint sequence = item / tiles / args.heads;
    if (sequence >= args.m / args.positions) return;
    const uint row = tile * G::kRows + at.lane / G::kRowLanes * G::kLaneRows;
    const uint first = at.lane % G::kRowLanes * 4;
    state += (ulong(sequence) * args.heads + head) * args.n * fc_k;
    if (fc_k <= G::kMostValues / 4) {
      walk<G::kMostValues / G::kRowLanes / 4>(from, y, state, args, sequence, head, row, first);
    } else if (fc_k <= G::kMostValues / 2) {
      walk<G::kMostValues / G::kRowLanes / 2>(from, y, state, args, sequence, head, row, first);
    } else {
      walk<G::kMostValues / G::kRowLanes>(from, y, state, args, sequence, head, row, first);
    }
  }
};

}  // namespace metalmm
