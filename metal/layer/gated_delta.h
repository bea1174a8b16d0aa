// The gated delta rule (Yang et al., arXiv:2412.06464): steps of a state S [k, n] of each head,
//     S = e^g S,   S = S + k (beta (v - k^T S))^T,   y = q^T S
// of q / |q| / sqrt(k) and k / |k|, g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).
//
// Row m of x, a position of a sequence, has q and k of kv_heads heads, fc_k values each, then v of
// `heads` heads, n values each. heads / kv_heads heads of v share q and k. x2 and c are rows of a
// and b, a value a head. y is [sequence, position, head, n]; f32, rounded once.
//
// Owner    a threadgroup owns kGroupColumns columns of S of a head, a simdgroup kColumns of them; a
//          lane 4 in 4 of every 4 kRowLanes rows, in registers through all positions. The
//          simdgroups load a block of kPositions positions while they compute the block before.
// Traffic  S once there and once back; q and k once for kGroupColumns columns, from the cache but
//          for the first time.
// Needs    fc_k at most kMostRows * kRowLanes; n a multiple of 4; threadgroup memory for the rows
//          of a block.
#pragma once

#include "../entry.h"
#include "activation.h"
#include "lane_sums.h"

namespace metalmm {

template <class T>
struct GatedDelta {
  using G = GatedDeltaGeometry;
  MM_CONST uint kBlock = G::kPositions, kSimdgroups = G::kThreads / kSimdWidth;
  MM_CONST uint kEach = kBlock / kSimdgroups;  // positions of a block that a simdgroup loads
  MM_CONST int kLanes = G::kColumns / 4;       // lanes of a row
  static_assert(G::kRowLanes == 16, "sums of lane_sums.h");

  struct From {
    device const T* x;
    device const T* a;
    device const T* b;
    device const T* a_log;
    device const T* dt_bias;
  };

  // A thread's share of the state.
  struct Owned {
    uint sequence, head, key, lane;
    uint group_column;   // the first of the threadgroup
    uint column, first;  // the first of the lane's 4, and of its rows
    uint summed;         // the column that it sums up
    float rate, bias;    // values of the head
  };

  // The scales of q and k, the decay and beta of each position of a block; then its q and k, with
  // zeros up to a multiple of 4, and v of the threadgroup's columns.
  struct Block {
    threadgroup float4* scales;
    threadgroup T* rows;

    static METAL_FUNC Block at(threadgroup float4* memory) {
      return {memory, reinterpret_cast<threadgroup T*>(memory + kBlock)};
    }
    static METAL_FUNC uint keys() { return (fc_k + 3) / 4 * 4; }
    static METAL_FUNC threadgroup T* row(Block block, uint p) {
      return block.rows + p * (2 * keys() + G::kGroupColumns);
    }
  };

  // A value for each head, f32 where fc_epilogue says so.
  static METAL_FUNC float of_head(device const T* values, uint head) {
    if (fc_epilogue & kDeltaFloatHeads) return reinterpret_cast<device const float*>(values)[head];
    return float(values[head]);
  }

  // The positions of a block that a simdgroup loads, every kSimdgroups-th: a lane has every
  // kSimdWidth-th value.
  template <int kRows>
  struct Loaded {
    MM_CONST int kValues = (kRows * G::kRowLanes + kSimdWidth - 1) / kSimdWidth;
    T q[kEach][kValues], k[kEach][kValues], v[kEach], a[kEach], b[kEach];

    // Loads the block from `position` on; behind the last position that one once more.
    static METAL_FUNC Loaded of(From from, constant KernelArgs& args, Owned own, uint position,
                                Position at) {
      Loaded out;
      MM_UNROLL
      for (uint e = 0; e < kEach; ++e) {
        const uint p = min(position + e * kSimdgroups + at.sg, args.positions - 1);
        const ulong m = ulong(own.sequence) * args.positions + p;
        device const T* x = from.x + m * args.x_stride;
        device const T* q = x + own.key * fc_k;
        device const T* k = q + args.kv_heads * fc_k;
        MM_UNROLL
        for (int i = 0; i < kValues; ++i) {
          const uint row = at.lane + i * kSimdWidth;
          out.q[e][i] = row < fc_k ? q[row] : T(0.0f);
          out.k[e][i] = row < fc_k ? k[row] : T(0.0f);
        }
        const uint column = own.group_column + at.lane;
        device const T* v = x + 2 * args.kv_heads * fc_k + own.head * args.n;
        out.v[e] = column < args.n ? v[column] : T(0.0f);
        out.a[e] = from.a[m * args.x2_stride + own.head];
        out.b[e] = from.b[m * args.y_stride + own.head];
      }
      return out;
    }

    // The sum over the lane's values alone.
    static METAL_FUNC float sum_of_squares(thread const T (&v)[kValues]) {
      float sum = 0.0f;
      MM_UNROLL
      for (int i = 0; i < kValues; ++i) sum = fma(float(v[i]), float(v[i]), sum);
      return sum;
    }

    static METAL_FUNC void store(thread const Loaded& in, Block block, Owned own, float eps,
                                 Position at) {
      static_assert(G::kGroupColumns == kSimdWidth, "a lane has a value of v");
      float squares[2 * kEach];
      MM_UNROLL
      for (uint e = 0; e < kEach; ++e) {
        squares[2 * e] = sum_of_squares(in.q[e]);
        squares[2 * e + 1] = sum_of_squares(in.k[e]);
      }
      sum_each(squares);
      MM_UNROLL
      for (uint e = 0; e < kEach; ++e) {
        const uint p = e * kSimdgroups + at.sg;
        threadgroup T* to = Block::row(block, p);
        MM_UNROLL
        for (int i = 0; i < kValues; ++i) {
          const uint row = at.lane + i * kSimdWidth;
          if (row < Block::keys()) to[row] = in.q[e][i];
          if (row < Block::keys()) to[Block::keys() + row] = in.k[e][i];
        }
        to[2 * Block::keys() + at.lane] = in.v[e];
        const float q_scale = rsqrt(squares[2 * e] + eps) * rsqrt(float(fc_k));
        const float k_scale = rsqrt(squares[2 * e + 1] + eps);
        const float decay = exp(-own.rate * softplus(float(in.a[e]) + own.bias));
        const float beta = sigmoid(float(in.b[e]));
        if (at.lane == 0) block.scales[p] = float4(q_scale, k_scale, decay, beta);
      }
    }
  };

  // Row i of the lane's.
  static METAL_FUNC uint row_of(Owned own, int i) {
    return own.first + i / 4 * (4 * G::kRowLanes) + i % 4;
  }

  // The values of q or k of the lane's rows.
  template <int kRows>
  static METAL_FUNC void load_rows(const threadgroup T* from, Owned own, thread float (&v)[kRows]) {
    using Four = vec<T, 4>;
    MM_UNROLL
    for (int i = 0; i < kRows; i += 4) {
      const uint row = row_of(own, i);
      Four four = Four(T(0.0f));
      if (row < Block::keys()) four = *reinterpret_cast<const threadgroup Four*>(from + row);
      MM_UNROLL
      for (int j = 0; j < 4; ++j) v[i + j] = float(four[j]);
    }
  }

  // The lane's shares of q^T S of a position, and what the sums are yet to be multiplied by.
  struct Waiting {
    float sums[1][4], scale;
    uint position;
  };

  // y of a position, whose sum is that of the lane's column.
  static METAL_FUNC void store(device T* y, constant KernelArgs& args, Owned own, Waiting waiting,
                               float sum) {
    const bool is_first = own.lane < 4 * kLanes && own.summed < args.n;
    if (!is_first || waiting.position >= args.positions) return;
    const ulong m = ulong(own.sequence) * args.positions + waiting.position;
    y[(m * args.heads + own.head) * args.n + own.summed] = T(sum * waiting.scale);
  }

  // A step of position p of the block; what the last one left is summed up beside its own sums.
  template <int kRows>
  static METAL_FUNC void step(Block block, uint p, Owned own, thread float (&s)[kRows][4],
                              thread Waiting& last, device T* y, constant KernelArgs& args) {
    const threadgroup T* q = Block::row(block, p);
    const threadgroup T* k = q + Block::keys();
    const threadgroup T* v = k + Block::keys();
    const float4 scales = block.scales[p];
    const float k_scale = scales[1], decay = scales[2], beta = scales[3];
    float keys[kRows], queries[kRows], fours[2][4] = {}, sums[2];
    load_rows(k, own, keys);
    load_rows(q, own, queries);
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MM_UNROLL
      for (int c = 0; c < 4; ++c) {
        s[i][c] *= decay;
        fours[0][c] = fma(s[i][c], keys[i], fours[0][c]);
      }
    }
    MM_UNROLL
    for (int c = 0; c < 4; ++c) fours[1][c] = last.sums[0][c];
    sum_fours<kLanes>(fours, own.lane, sums);
    const float value = float(v[own.summed - own.group_column]);
    float delta[4];
    share_four<kLanes>((value - sums[0] * k_scale) * beta * k_scale, own.lane, delta);
    store(y, args, own, last, sums[1]);
    MM_UNROLL
    for (int c = 0; c < 4; ++c) last.sums[0][c] = 0.0f;
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MM_UNROLL
      for (int c = 0; c < 4; ++c) {
        s[i][c] = fma(keys[i], delta[c], s[i][c]);
        last.sums[0][c] = fma(s[i][c], queries[i], last.sums[0][c]);
      }
    }
    last.scale = scales[0];
  }

  template <int kRows>
  static METAL_FUNC void walk(From from, device T* y, device float4* state,
                              constant KernelArgs& args, Owned own, Block block, Position at) {
    float s[kRows][4];
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint row = row_of(own, i);
      const bool is_inside = row < fc_k && own.column < args.n;
      const float4 four = is_inside ? state[ulong(row) * (args.n / 4)] : float4(0.0f);
      MM_UNROLL
      for (int c = 0; c < 4; ++c) s[i][c] = four[c];
    }
    Waiting last = {};
    last.position = args.positions;
    Loaded<kRows> next = Loaded<kRows>::of(from, args, own, 0, at);
    for (uint position = 0; position < args.positions; position += kBlock) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the block before is read
      Loaded<kRows>::store(next, block, own, args.eps, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      next = Loaded<kRows>::of(from, args, own, position + kBlock, at);
      const uint count = min(kBlock, args.positions - position);
      for (uint p = 0; p < count; ++p) {
        step(block, p, own, s, last, y, args);
        last.position = position + p;
      }
    }
    float sums[1];
    sum_fours<kLanes>(last.sums, own.lane, sums);
    store(y, args, own, last, sums[0]);
    MM_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint row = row_of(own, i);
      if (row < fc_k && own.column < args.n) {
        state[ulong(row) * (args.n / 4)] = float4(s[i][0], s[i][1], s[i][2], s[i][3]);
      }
    }
  }

  static METAL_FUNC void run(From from, device T* y, device float* state, constant KernelArgs& args,
                             threadgroup float4* memory, Position at) {
    const uint groups = (args.n + G::kGroupColumns - 1) / G::kGroupColumns;
    Owned own;
    own.head = at.tg.x / groups % args.heads;
    own.sequence = at.tg.x / groups / args.heads;
    own.key = own.head / (args.heads / args.kv_heads);
    own.group_column = at.tg.x % groups * G::kGroupColumns;
    own.column = own.group_column + at.sg * G::kColumns + at.lane % kLanes * 4;
    own.first = at.lane / kLanes * 4;
    own.lane = at.lane;
    own.summed = own.column + summed_by<kLanes>(at.lane);
    own.rate = exp(of_head(from.a_log, own.head));
    own.bias = of_head(from.dt_bias, own.head);
    const ulong first = (ulong(own.sequence) * args.heads + own.head) * fc_k * args.n + own.column;
    device float4* from_state = reinterpret_cast<device float4*>(state + first);
    const Block block = Block::at(memory);
    if (fc_k <= G::kRowLanes * G::kMostRows / 4) {
      walk<G::kMostRows / 4>(from, y, from_state, args, own, block, at);
    } else if (fc_k <= G::kRowLanes * G::kMostRows / 2) {
      walk<G::kMostRows / 2>(from, y, from_state, args, own, block, at);
    } else {
      walk<G::kMostRows>(from, y, from_state, args, own, block, at);
    }
  }
};

}  // namespace metalmm
