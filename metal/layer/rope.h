// The heads of q, k and v out of a merged projection, rotated by their positions.
//
// Row m of x, a position of a sequence, has the heads of q, of k and, where x2 has none, of v, fc_k
// values each. Heads of q and of k are normalised where they have a weight, each head or all heads
// as one row, and those of v where asked, without a weight; then pairs (i, j) of the first
// `rotated` values of a head of q or k become
//     y[i] = x[i] cos[i] - x[j] sin[i],   y[j] = x[j] cos[j] + x[i] sin[j]
// and the rest is copied, in f32, rounded once. Results are [sequence, head, position, fc_k].
//
// Owner    a simdgroup owns a head of a row.
// Traffic  every value of x once, with a norm of each head twice, with one of all heads once more
//          for each head; cos and sin once for each head. All from the cache but the first time.
// Needs    nothing.
#pragma once

#include <metal_simdgroup>

#include "norm.h"

namespace metalmm {

// A row of cos or of sin, which begins at value `first`.
template <class T>
struct Angles {
  device const T* table;
  ulong first;
  static METAL_FUNC float value(Angles a, uint i) {
    if (fc_epilogue & kRopeFloatTables) {
      return reinterpret_cast<device const float*>(a.table)[a.first + i];
    }
    return float(a.table[a.first + i]);
  }
};

// The values of a head, normalised.
template <class T>
struct Head {
  device const T* x;
  device const T* weight;
  float scale, offset;
  bool has_norm, has_weight;

  static METAL_FUNC float value(Head h, uint i) {
    const float x = float(h.x[i]);
    if (!h.has_norm) return x;
    if (!h.has_weight) return x * h.scale;
    const float weight = float(h.weight[i]);
    return x * h.scale * (fc_epilogue & kRopeOffset ? h.offset + weight : weight);
  }
};

// The head of a row of x: the `head`-th of q, of k or of v.
struct HeadPlace {
  uint group;  // 0, 1, 2
  uint head;

  static METAL_FUNC HeadPlace of(constant KernelArgs& args, uint head) {
    const uint keys = args.heads, values = keys + args.kv_heads;
    if (head < keys) return {0, head};
    if (head < values) return {1, head - keys};
    return {2, head - values};
  }
};

template <class T>
struct Rope {
  struct From {
    device const T* x;
    device const T* x2;
    device const T* cosines;
    device const T* sines;
    device const T* q_weight;
    device const T* k_weight;
  };

  // The head whose values begin at x, with the scale of its norm, which all lanes compute.
  static METAL_FUNC Head<T> head(device const T* x, HeadPlace place, From from,
                                 constant KernelArgs& args, uint lane) {
    const bool has_weight = (place.group == 0 && (fc_epilogue & kRopeNormQ) != 0) ||
                            (place.group == 1 && (fc_epilogue & kRopeNormK) != 0);
    const bool has_norm = has_weight || (place.group == 2 && (fc_epilogue & kRopeNormV) != 0);
    const bool is_whole = has_weight && (fc_epilogue & kRopeWholeNorms) != 0;
    const uint heads = !is_whole ? 1 : place.group == 0 ? args.heads : args.kv_heads;
    const uint before = is_whole ? place.head * fc_k : 0;  // values of the row of the norm
    Head<T> out = {x,        (place.group == 0 ? from.q_weight : from.k_weight) + before,
                   1.0f,     args.offset,
                   has_norm, has_weight};
    if (has_norm) {
      device const T* row = x - before;
      float squares = 0.0f;
      for (uint i = lane; i < heads * fc_k; i += kSimdWidth) {
        squares = fma(float(row[i]), float(row[i]), squares);
      }
      out.scale = norm_scale(simd_sum(squares) / float(heads), args.eps);
    }
    return out;
  }

  static METAL_FUNC void write(Head<T> head, device T* y, Angles<T> cosines, Angles<T> sines,
                               uint rotated, uint lane) {
    const bool is_interleaved = (fc_epilogue & kRopeInterleaved) != 0;
    for (uint pair = lane; pair < rotated / 2; pair += kSimdWidth) {
      const uint i = is_interleaved ? 2 * pair : pair;
      const uint j = is_interleaved ? i + 1 : i + rotated / 2;
      const float a = Head<T>::value(head, i), b = Head<T>::value(head, j);
      y[i] = T(fma(a, Angles<T>::value(cosines, i), -(b * Angles<T>::value(sines, i))));
      y[j] = T(fma(b, Angles<T>::value(cosines, j), a * Angles<T>::value(sines, j)));
    }
    for (uint i = rotated + lane; i < fc_k; i += kSimdWidth) y[i] = T(Head<T>::value(head, i));
  }

  static METAL_FUNC void run(From from, device T* q, device T* k, device T* v,
                             constant KernelArgs& args, Position at) {
    const uint heads = args.heads + 2 * args.kv_heads;
    const uint item = at.tg.x * (HeadLanes::kThreads / kSimdWidth) + at.sg;
    const uint m = item / heads;
    if (m >= args.m) return;
    const HeadPlace place = HeadPlace::of(args, item % heads);
    device const T* x = from.x + (long(m) * args.x_stride + long(item % heads) * fc_k);
    if (place.group == 2 && (fc_epilogue & kRopeApart) != 0) {
      x = from.x2 + (long(m) * args.x2_stride + long(place.head) * fc_k);
    }
    const uint sequence = m / args.positions, position = m % args.positions;
    const uint count = place.group == 0 ? args.heads : args.kv_heads;
    const ulong to = (ulong(sequence) * count + place.head) * args.positions + position;
    device T* y = (place.group == 0 ? q : place.group == 1 ? k : v) + to * fc_k;
    const ulong first = ulong(m % args.count) * args.rotated;
    write(head(x, place, from, args, at.lane), y, {from.cosines, first}, {from.sines, first},
          place.group != 2 ? args.rotated : 0, at.lane);
  }
};

}  // namespace metalmm
