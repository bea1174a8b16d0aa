// rope, of which k and v go to the slots of a cache, in the format of the cache: rounded to T as
// rope rounds them, then quantized. Without heads of q: rows [sequence, head, position] of x and x2
// as they are. A row of a rotated format is that of hadamard(the rounded values).
//
// Owner    a simdgroup owns a head of a row.
// Traffic  as rope; a value of a rotated head of k twice, the second time from the cache.
// Needs    nothing. A slot that the cache does not have is not written.
#pragma once

#include "../formats/encode.h"
#include "hadamard.h"
#include "rope.h"

namespace metalmm {

// The cache of a layer: keys and values, and the slots of the positions.
struct CacheRows {
  device uchar* keys;
  device uchar* values;
  device const long* slots;
};

template <class Format, class T>
struct RopeAppend {
  using From = typename Rope<T>::From;

  // Value i of a head, turned: what Rope<T>::write() computes.
  static METAL_FUNC float turned(Head<T> head, Angles<T> cosines, Angles<T> sines, uint rotated,
                                 uint i) {
    const float a = Head<T>::value(head, i);
    if (i >= rotated) return a;
    const bool is_interleaved = (fc_epilogue & kRopeInterleaved) != 0;
    const uint half_way = rotated / 2;
    const bool is_first = is_interleaved ? (i & 1) == 0 : i < half_way;
    const uint other = is_interleaved ? i ^ 1 : is_first ? i + half_way : i - half_way;
    const float b = Head<T>::value(head, other) * Angles<T>::value(sines, i);
    return fma(a, Angles<T>::value(cosines, i), is_first ? -b : b);
  }

  static METAL_FUNC device const T* begin(device const T* x, device const T* x2,
                                          constant KernelArgs& args, uint m, uint head) {
    const long sequence = m / args.positions, position = m % args.positions;
    const uint values = args.heads + args.kv_heads;
    if (head >= values && (fc_epilogue & kRopeApart) != 0) {
      return x2 + (sequence * args.x2_sequence_stride + position * args.x2_stride +
                   long(head - values) * args.x2_head_stride);
    }
    return x + (sequence * args.x_sequence_stride + position * args.x_stride +
                long(head) * args.x_head_stride);
  }

  static METAL_FUNC void run(From from, device T* q, CacheRows cache, constant KernelArgs& args,
                             Position at) {
    const uint heads = args.heads + 2 * args.kv_heads;
    const uint item = at.tg.x * (HeadLanes::kThreads / kSimdWidth) + at.sg;
    const uint m = item / heads;
    if (m >= args.m) return;
    const HeadPlace place = HeadPlace::of(args, item % heads);
    const uint sequence = m / args.positions, position = m % args.positions;
    device const T* values = begin(from.x, from.x2, args, m, item % heads);
    const uint rotated = place.group != 2 ? args.rotated : 0;
    const ulong first = ulong(m % args.count) * args.rotated;
    const Angles<T> cosines = {from.cosines, first}, sines = {from.sines, first};
    if (place.group == 0) {
      const ulong to = (ulong(sequence) * args.heads + place.head) * args.positions + position;
      Rope<T>::write(Rope<T>::head(values, place, from, args, at.lane), q + to * fc_k, cosines,
                     sines, rotated, at.lane);
      return;
    }
    const long slot = cache.slots[fc_epilogue & kRopePages ? m : position];
    if (slot < 0 || slot >= long(args.n)) return;
    const Head<T> head = Rope<T>::head(values, place, from, args, at.lane);
    const bool is_key = place.group == 1;
    const bool is_half = is_key && (fc_epilogue & kRopeHalfKeys) != 0;
    device uchar* row =
        is_key ? cache.keys + (long(sequence) * args.sequence_stride +
                               long(place.head) * args.head_stride + slot * args.w_stride)
               : cache.values + (long(sequence) * args.sequence2_stride +
                                 long(place.head) * args.head2_stride + slot * args.w2_stride);
    const bool is_rotated = (fc_epilogue & (is_key ? kRopeRotateKeys : kRopeRotateValues)) != 0;
    for (uint i = at.lane; i < fc_k; i += kSimdWidth) {
      float value = float(T(turned(head, cosines, sines, rotated, i)));
      if (is_rotated) value = hadamard(value, at.lane);
      if (is_half) {
        Encoder<F16>::store(row, i, value, at.lane);
      } else {
        Encoder<Format>::store(row, i, value, at.lane);
      }
    }
  }
};

}  // namespace metalmm
