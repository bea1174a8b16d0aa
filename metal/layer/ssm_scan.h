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
// Owner    a threadgroup owns kGroupRows rows of S of a head, a simdgroup kRows of them; a lane 4
//          values of every 4 kRowLanes of kLaneRows rows, in registers through all positions. The
//          simdgroups load a block of kPositions positions while they compute the block before.
// Traffic  S once there and once back; b and c once for kGroupRows rows, from the cache but for the
//          first time.
// Needs    fc_k at most kMostValues and a multiple of 4; threadgroup memory for the rows of
//          a block.
#pragma once

#include "../entry.h"
#include "activation.h"
#include "lane_sums.h"

namespace metalmm {

template <class T>
struct SsmScan {
  using G = SsmScanGeometry;
  MM_CONST uint kBlock = G::kPositions, kSimdgroups = G::kThreads / kSimdWidth;
  MM_CONST uint kEach = kBlock / kSimdgroups;  // positions of a block that a simdgroup loads

  struct From {
    device const T* x;
    device const T* dt;
    device const T* gate;
    device const T* a_log;
    device const T* dt_bias;
    device const T* d;
  };

  static_assert(G::kRowLanes == 16 && G::kLaneRows == 4, "sums of lane_sums.h");

  // A thread's share of the state.
  struct Owned {
    uint sequence, head, group, lane;
    uint group_row;       // the first of the threadgroup
    uint row, first;      // the first of the lane's rows, and of its values
    uint summed;          // the row that it sums up
    float rate, bias, d;  // values of the head
  };

  // t and the decay of each position of a block, silu(gate) of the threadgroup's rows; then b and
  // c, fc_k values each, and x of these rows.
  struct Block {
    threadgroup float4* steps;
    threadgroup float* gates;
    threadgroup T* rows;

    static METAL_FUNC Block at(threadgroup float4* memory) {
      threadgroup float* gates = reinterpret_cast<threadgroup float*>(memory + kBlock);
      return {memory, gates, reinterpret_cast<threadgroup T*>(gates + kBlock * G::kGroupRows)};
    }
    static METAL_FUNC threadgroup T* row(Block block, uint p) {
      return block.rows + p * (2 * fc_k + G::kGroupRows);
    }
  };

  // A value for each head, f32 where fc_epilogue says so.
  static METAL_FUNC float of_head(device const T* values, uint head) {
    if (fc_epilogue & kSsmFloatHeads) return reinterpret_cast<device const float*>(values)[head];
    return float(values[head]);
  }

  // The positions of a block that a simdgroup loads, every kSimdgroups-th: a lane has every
  // kSimdWidth-th value.
  template <int kMost>
  struct Loaded {
    MM_CONST int kValues = (kMost + kSimdWidth - 1) / kSimdWidth;
    T b[kEach][kValues], c[kEach][kValues], x[kEach], gate[kEach], dt[kEach];

    // Loads the block from `position` on; behind the last position that one once more.
    static METAL_FUNC Loaded of(From from, constant KernelArgs& args, Owned own, uint position,
                                Position at) {
      Loaded out;
      MM_UNROLL
      for (uint e = 0; e < kEach; ++e) {
        const uint p = min(position + e * kSimdgroups + at.sg, args.positions - 1);
        const ulong m = ulong(own.sequence) * args.positions + p;
        device const T* x = from.x + m * args.x_stride;
        device const T* b = x + args.heads * args.n + own.group * fc_k;
        device const T* c = b + args.kv_heads * fc_k;
        MM_UNROLL
        for (int i = 0; i < kValues; ++i) {
          const uint value = at.lane + i * kSimdWidth;
          out.b[e][i] = value < fc_k ? b[value] : T(0.0f);
          out.c[e][i] = value < fc_k ? c[value] : T(0.0f);
        }
        const uint row = own.group_row + at.lane, value = own.head * args.n + row;
        out.x[e] = row < args.n ? x[value] : T(0.0f);
        out.gate[e] = T(0.0f);
        if (fc_epilogue & kSsmGate && row < args.n) {
          out.gate[e] = from.gate[m * args.y_stride + value];
        }
        out.dt[e] = from.dt[m * args.x2_stride + own.head];
      }
      return out;
    }

    static METAL_FUNC void store(thread const Loaded& in, Block block, Owned own,
                                 constant KernelArgs& args, Position at) {
      static_assert(G::kGroupRows == kSimdWidth, "a lane has a value of x");
      MM_UNROLL
      for (uint e = 0; e < kEach; ++e) {
        const uint p = e * kSimdgroups + at.sg;
        threadgroup T* to = Block::row(block, p);
        MM_UNROLL
        for (int i = 0; i < kValues; ++i) {
          const uint value = at.lane + i * kSimdWidth;
          if (value < fc_k) to[value] = in.b[e][i];
          if (value < fc_k) to[fc_k + value] = in.c[e][i];
        }
        to[2 * fc_k + at.lane] = in.x[e];
        block.gates[p * G::kGroupRows + at.lane] =
            fc_epilogue & kSsmGate ? silu(float(in.gate[e])) : 1.0f;
        const float open = softplus(float(in.dt[e]) + own.bias);
        const float t = min(max(open, args.alpha), args.beta);
        if (at.lane == 0) block.steps[p] = float4(t, exp(-own.rate * t), 0.0f, 0.0f);
      }
    }
  };

  // The lane's shares of S c of a position, and what its row of y is made of.
  struct Waiting {
    float sums[1][G::kLaneRows], skipped, gate;
    uint position;
  };

  static METAL_FUNC void store(device T* y, constant KernelArgs& args, Owned own, Waiting waiting) {
    float sums[1];
    sum_fours<1>(waiting.sums, own.lane, sums);
    const float sum = sums[0] + waiting.skipped;
    const bool is_first = own.lane % G::kRowLanes < 4 && own.summed < args.n;
    if (!is_first || waiting.position >= args.positions) return;
    const ulong m = ulong(own.sequence) * args.positions + waiting.position;
    y[(m * args.heads + own.head) * args.n + own.summed] = T(sum * waiting.gate);
  }

  // A step of position p of the block.
  template <int kValues>
  static METAL_FUNC void step(Block block, uint p, Owned own,
                              thread float (&s)[G::kLaneRows][kValues], thread Waiting& out) {
    const threadgroup T* b = Block::row(block, p);
    const threadgroup T* c = b + fc_k;
    const threadgroup T* x = c + fc_k;
    const float t = block.steps[p][0], decay = block.steps[p][1];
    float scaled[G::kLaneRows];
    MM_UNROLL
    for (int r = 0; r < G::kLaneRows; ++r) {
      scaled[r] = t * float(x[own.row - own.group_row + r]);
      out.sums[0][r] = 0.0f;
    }
    const uint summed = own.summed - own.group_row;
    out.skipped = own.d * float(x[summed]);
    out.gate = block.gates[p * G::kGroupRows + summed];
    using Four = vec<T, 4>;
    MM_UNROLL
    for (int i = 0; i < kValues; i += 4) {
      const uint value = own.first + i * G::kRowLanes;
      if (value >= fc_k) continue;
      const Four in = *reinterpret_cast<const threadgroup Four*>(b + value);
      const Four seen = *reinterpret_cast<const threadgroup Four*>(c + value);
      MM_UNROLL
      for (int j = 0; j < 4; ++j) {
        MM_UNROLL
        for (int r = 0; r < G::kLaneRows; ++r) {
          s[r][i + j] = fma(scaled[r], float(in[j]), s[r][i + j] * decay);
          out.sums[0][r] = fma(s[r][i + j], float(seen[j]), out.sums[0][r]);
        }
      }
    }
  }

  template <int kValues>
  static METAL_FUNC void walk(From from, device T* y, device float* state,
                              constant KernelArgs& args, Owned own, Block block, Position at) {
    float s[G::kLaneRows][kValues];
    MM_UNROLL
    for (int r = 0; r < G::kLaneRows; ++r) {
      device const float4* fours =
          reinterpret_cast<device const float4*>(state + ulong(own.row + r) * fc_k + own.first);
      MM_UNROLL
      for (int i = 0; i < kValues; i += 4) {
        const bool is_inside = own.row + r < args.n && own.first + i * G::kRowLanes < fc_k;
        const float4 four = is_inside ? fours[i / 4 * G::kRowLanes] : float4(0.0f);
        MM_UNROLL
        for (int c = 0; c < 4; ++c) s[r][i + c] = four[c];
      }
    }
    using Rows = Loaded<kValues * G::kRowLanes>;
    Rows next = Rows::of(from, args, own, 0, at);
    Waiting last = {};
    last.position = args.positions;
    for (uint position = 0; position < args.positions; position += kBlock) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the block before is read
      Rows::store(next, block, own, args, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      next = Rows::of(from, args, own, position + kBlock, at);
      const uint count = min(kBlock, args.positions - position);
      for (uint p = 0; p < count; ++p) {
        store(y, args, own, last);  // lanes of store() wait for each other beside the step
        step(block, p, own, s, last);
        last.position = position + p;
      }
    }
    store(y, args, own, last);
    MM_UNROLL
    for (int r = 0; r < G::kLaneRows; ++r) {
      device float4* fours =
          reinterpret_cast<device float4*>(state + ulong(own.row + r) * fc_k + own.first);
      MM_UNROLL
      for (int i = 0; i < kValues; i += 4) {
        if (own.row + r >= args.n || own.first + i * G::kRowLanes >= fc_k) continue;
        fours[i / 4 * G::kRowLanes] = float4(s[r][i], s[r][i + 1], s[r][i + 2], s[r][i + 3]);
      }
    }
  }

  static METAL_FUNC void run(From from, device T* y, device float* state, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const uint groups = (args.n + G::kGroupRows - 1) / G::kGroupRows;
    Owned own;
    own.head = at.tg.x / groups % args.heads;
    own.sequence = at.tg.x / groups / args.heads;
    own.group = own.head / (args.heads / args.kv_heads);
    own.group_row = at.tg.x % groups * G::kGroupRows;
    own.row = own.group_row + at.sg * G::kRows + at.lane / G::kRowLanes * G::kLaneRows;
    own.first = at.lane % G::kRowLanes * 4;
    own.lane = at.lane;
    own.summed = own.row + summed_by<1>(at.lane);
    own.rate = exp(of_head(from.a_log, own.head));
    own.bias = of_head(from.dt_bias, own.head);
    own.d = of_head(from.d, own.head);
    state += (ulong(own.sequence) * args.heads + own.head) * args.n * fc_k;
    const Block block = Block::at(memory);
    if (fc_k <= G::kMostValues / 4) {
      walk<G::kMostValues / G::kRowLanes / 4>(from, y, state, args, own, block, at);
    } else if (fc_k <= G::kMostValues / 2) {
      walk<G::kMostValues / G::kRowLanes / 2>(from, y, state, args, own, block, at);
    } else {
      walk<G::kMostValues / G::kRowLanes>(from, y, state, args, own, block, at);
    }
  }
};

}  // namespace metalmm
