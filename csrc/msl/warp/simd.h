// <metal_simdgroup> and <metal_quadgroup> on a GPU, for lanes that all take part. runtime.h of the
// target comes before this file: lane(), word_from_lane(), word_from_lane_xor(). Results are the
// emulator's, bit for bit: a reduction adds lane i and i + 16, then 8, 4, 2, 1 (every
// lane computes the sum of lane 0, for its operators commute); a prefix goes from lane to lane.
#pragma once

#include "library/simd_types.h"

namespace metal {
namespace emulator {

// (P)x as msl/translate.py writes it in other projects' text. The one that checks is the host's.
template <class P, class X>
METAL_FUNC P cast_pointer(X x) {
  return (P)x;
}

}  // namespace emulator

namespace warp {

// x of another lane, as 32-bit words.
template <class T, class Move>
METAL_FUNC T by_words(T x, Move move) {
  constexpr uint kWords = (sizeof(T) + 3) / 4;
  uint words[kWords] = {};
  __builtin_memcpy(words, &x, sizeof(T));
#pragma clang loop unroll(full)
  for (uint i = 0; i < kWords; ++i) words[i] = move(words[i]);
  __builtin_memcpy(&x, words, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC T from_lane(T x, uint lane) {
  return by_words(x, [=](uint w) { return word_from_lane(w, lane); });
}
template <class T>
METAL_FUNC T from_lane_xor(T x, uint mask) {
  return by_words(x, [=](uint w) { return word_from_lane_xor(w, mask); });
}

template <uint Width, class Op, class T>
METAL_FUNC T reduce(T x) {
#pragma clang loop unroll(full)
  for (uint d = Width / 2; d > 0; d /= 2) x = Op::of(x, from_lane_xor(x, d));
  return x;
}

template <uint Width, class Op, bool Inclusive, class T>
METAL_FUNC T prefix(T x) {
  const uint me = lane() % Width, first = lane() - me;
  T sum = Op::template identity<T>();
  for (uint i = 0; i < Width; ++i) {
    const T next = Op::of(sum, from_lane(x, first + i));
    if (Inclusive ? i <= me : i < me) sum = next;
  }
  return sum;
}

// x of lane `from` of the scope; `fill` where there is no such lane.
template <uint Width, class T>
METAL_FUNC T shuffle(T x, T fill, int from) {
  const uint first = lane() / Width * Width;
  const T other = from_lane(x, first + static_cast<uint>(from) % Width);
  return from < 0 || from >= static_cast<int>(Width) ? fill : other;
}

// Lanes come in sets of `modulo`: from outside its set a lane reads the neighbouring set's
// place in `fill`.
template <uint Width, class T>
METAL_FUNC T fill_shuffle(T x, T fill, int by, int modulo) {
  const int me = static_cast<int>(lane() % Width), set = me / modulo * modulo, at = me - set + by;
  const int from = set + (at + modulo) % modulo;
  const T data = shuffle<Width>(x, x, from), other = shuffle<Width>(fill, fill, from);
  return at >= 0 && at < modulo ? data : other;
}

// Bit i: lane i of the scope votes true.
template <uint Width>
METAL_FUNC uint ballot(bool x) {
  return reduce<Width, simd_operators::Or>(x ? 1u << lane() % Width : 0u);
}

}  // namespace warp

#define MM_REDUCE(name, scope, Width, Op)                 \
  template <class T>                                      \
  METAL_FUNC T scope##_##name(T x) {                      \
    return warp::reduce<Width, simd_operators::Op, T>(x); \
  }
#define MM_PREFIX(name, scope, Width, Op, inclusive)                 \
  template <class T>                                                 \
  METAL_FUNC T scope##_prefix_##name(T x) {                          \
    return warp::prefix<Width, simd_operators::Op, inclusive, T>(x); \
  }
#define MM_SHUFFLE(name, scope, Width, from)                   \
  template <class T>                                           \
  METAL_FUNC T scope##_##name(T x, ushort n) {                 \
    const int me = static_cast<int>(warp::lane() % Width);     \
    (void)me;                                                  \
    return warp::shuffle<Width>(x, x, static_cast<int>(from)); \
  }
#define MM_SCOPE(scope, Width)                                                                \
  MM_EACH_LANE_FUNCTION(scope, Width)                                                         \
  template <class T>                                                                          \
  METAL_FUNC T scope##_shuffle_and_fill_up(T x, T fill, ushort n, ushort modulo = Width) {    \
    return warp::fill_shuffle<Width>(x, fill, -static_cast<int>(n), modulo);                  \
  }                                                                                           \
  template <class T>                                                                          \
  METAL_FUNC T scope##_shuffle_and_fill_down(T x, T fill, ushort n, ushort modulo = Width) {  \
    return warp::fill_shuffle<Width>(x, fill, static_cast<int>(n), modulo);                   \
  }                                                                                           \
  template <class T>                                                                          \
  METAL_FUNC T scope##_broadcast_first(T x) {                                                 \
    return warp::shuffle<Width>(x, x, 0);                                                     \
  }                                                                                           \
  METAL_FUNC scope##_vote scope##_ballot(bool x) { return warp::ballot<Width>(x); }           \
  METAL_FUNC bool scope##_any(bool x) { return warp::ballot<Width>(x) != 0; }                 \
  METAL_FUNC bool scope##_all(bool x) { return warp::ballot<Width>(!x) == 0; }                \
  METAL_FUNC scope##_vote scope##_active_threads_mask() { return warp::ballot<Width>(true); } \
  METAL_FUNC bool scope##_is_first() { return warp::lane() % Width == 0; }
MM_SCOPE(simd, 32)
MM_SCOPE(quad, 4)
#undef MM_SCOPE
#undef MM_SHUFFLE
#undef MM_PREFIX
#undef MM_REDUCE

}  // namespace metal
