// <metal_simdgroup>, <metal_quadgroup>: simd_* over the 32 lanes of a simdgroup, quad_* over 4
// neighbours.
#pragma once

#include "atomic.h"
#include "library/simd_types.h"
#include "runtime.h"

namespace metal {
namespace emulator {

// One value to all lanes. The tree halves the distance: lane i and i + 16, then 8, 4, 2, 1.
template <uint Width, class Op, class T>
void reduce(void* const* in, void* const* out) {
  T values[Width];
  bool have[Width];
  for (uint i = 0; i < Width; ++i) {
    have[i] = in[i] != nullptr;
    if (have[i]) values[i] = *static_cast<T*>(in[i]);
  }
  for (uint d = Width / 2; d > 0; d /= 2) {
    for (uint i = 0; i < d; ++i) {
      if (have[i] && have[i + d]) {
        values[i] = Op::of(values[i], values[i + d]);
      } else if (have[i + d]) {
        values[i] = values[i + d];
        have[i] = true;
      }
    }
  }
  for (uint i = 0; i < Width; ++i) {
    if (out[i]) *static_cast<T*>(out[i]) = values[0];
  }
}

template <uint Width, class Op, bool Inclusive, class T>
void prefix(void* const* in, void* const* out) {
  T sum = Op::template identity<T>();
  for (uint i = 0; i < Width; ++i) {
    if (in[i]) {
      T next = Op::of(sum, *static_cast<T*>(in[i]));
      *static_cast<T*>(out[i]) = Inclusive ? next : sum;
      sum = next;
    }
  }
}

// A lane's value and the lane it reads: outside [0, Width), itself.
template <class T>
struct Shuffle {
  T data;
  int from;
};
template <uint Width, class T>
void shuffle(void* const* in, void* const* out) {
  for (uint i = 0; i < Width; ++i) {
    if (!in[i]) continue;
    auto mine = static_cast<Shuffle<T>*>(in[i]);
    if (mine->from < 0 || mine->from >= static_cast<int>(Width)) {
      *static_cast<T*>(out[i]) = mine->data;
    } else if (in[mine->from]) {
      *static_cast<T*>(out[i]) = static_cast<Shuffle<T>*>(in[mine->from])->data;
    } else {
      __builtin_memset(out[i], 0xFF, sizeof(T));  // a lane that has returned has no value
    }
  }
}
template <uint Width, class T>
void first(void* const* in, void* const* out) {
  T value{};
  for (uint i = Width; i-- > 0;) {
    if (in[i]) value = *static_cast<T*>(in[i]);
  }
  for (uint i = 0; i < Width; ++i) {
    if (out[i]) *static_cast<T*>(out[i]) = value;
  }
}
template <uint Width>
void ballot(void* const* in, void* const* out) {
  ulong mask = 0;
  for (uint i = 0; i < Width; ++i) mask |= in[i] && *static_cast<bool*>(in[i]) ? 1ul << i : 0;
  for (uint i = 0; i < Width; ++i) {
    if (out[i]) *static_cast<ulong*>(out[i]) = mask;
  }
}

template <uint Width, class T, class In>
METAL_FUNC T collect(const char* kind, In in, MmCombine combine, const char* file, uint line) {
  T out;
  mm_collective(Width, kind, 0, file, line, combine, &in, &out);
  return out;
}

}  // namespace emulator

#define MM_REDUCE(name, scope, Width, Op)                                                 \
  template <class T>                                                                      \
  METAL_FUNC T scope##_##name(T x, MM_SITE) {                                             \
    return emulator::collect<Width, T>(                                                   \
        #scope "_" #name, x, emulator::reduce<Width, simd_operators::Op, T>, file, line); \
  }
#define MM_PREFIX(name, scope, Width, Op, inclusive)                                              \
  template <class T>                                                                              \
  METAL_FUNC T scope##_prefix_##name(T x, MM_SITE) {                                              \
    return emulator::collect<Width, T>(#scope "_prefix_" #name, x,                                \
                                       emulator::prefix<Width, simd_operators::Op, inclusive, T>, \
                                       file, line);                                               \
  }
#define MM_SHUFFLE(name, scope, Width, from)                                            \
  template <class T>                                                                    \
  METAL_FUNC T scope##_##name(T x, ushort n, MM_SITE) {                                 \
    int me = mm_lane() % Width;                                                         \
    (void)me;                                                                           \
    return emulator::collect<Width, T>(#scope "_" #name,                                \
                                       emulator::Shuffle<T>{x, static_cast<int>(from)}, \
                                       emulator::shuffle<Width, T>, file, line);        \
  }
#define MM_SCOPE(scope, Width)                                                                  \
  MM_EACH_LANE_FUNCTION(scope, Width)                                                           \
  template <class T>                                                                            \
  METAL_FUNC T scope##_shuffle_and_fill_up(T x, T fill, ushort n, ushort modulo = Width,        \
                                           MM_SITE) {                                           \
    return emulator::fill_shuffle<Width>(#scope "_shuffle_and_fill_up", x, fill,                \
                                         -static_cast<int>(n), modulo, file, line);             \
  }                                                                                             \
  template <class T>                                                                            \
  METAL_FUNC T scope##_shuffle_and_fill_down(T x, T fill, ushort n, ushort modulo = Width,      \
                                             MM_SITE) {                                         \
    return emulator::fill_shuffle<Width>(#scope "_shuffle_and_fill_down", x, fill,              \
                                         static_cast<int>(n), modulo, file, line);              \
  }                                                                                             \
  template <class T>                                                                            \
  METAL_FUNC T scope##_broadcast_first(T x, MM_SITE) {                                          \
    return emulator::collect<Width, T>(#scope "_broadcast_first", x, emulator::first<Width, T>, \
                                       file, line);                                             \
  }                                                                                             \
  METAL_FUNC scope##_vote scope##_ballot(bool x, MM_SITE) {                                     \
    return emulator::collect<Width, ulong>(#scope "_ballot", x, emulator::ballot<Width>, file,  \
                                           line);                                               \
  }                                                                                             \
  METAL_FUNC bool scope##_any(bool x, MM_SITE) {                                                \
    return emulator::collect<Width, ulong>(#scope "_any", x, emulator::ballot<Width>, file,     \
                                           line) != 0;                                          \
  }                                                                                             \
  METAL_FUNC bool scope##_all(bool x, MM_SITE) {                                                \
    return emulator::collect<Width, ulong>(#scope "_all", !x, emulator::ballot<Width>, file,    \
                                           line) == 0;                                          \
  }                                                                                             \
  METAL_FUNC scope##_vote scope##_active_threads_mask(MM_SITE) {                                \
    return emulator::collect<Width, ulong>(#scope "_active_threads_mask", true,                 \
                                           emulator::ballot<Width>, file, line);                \
  }                                                                                             \
  METAL_FUNC bool scope##_is_first(MM_SITE) {                                                   \
    return mm_lane() % Width == ctz(scope##_active_threads_mask(file, line).mask);              \
  }

namespace emulator {

// Lanes come in sets of `modulo`; a lane that would read from outside its set reads, of the
// neighbouring set's place in `fill`, the element that would follow.
template <class T>
struct FillShuffle {
  T data, fill;
  int by, modulo;
};
template <uint Width, class T>
void fill_combine(void* const* in, void* const* out) {
  for (int i = 0; i < static_cast<int>(Width); ++i) {
    if (!in[i]) continue;
    auto mine = static_cast<FillShuffle<T>*>(in[i]);
    int set = i / mine->modulo * mine->modulo, at = i - set + mine->by;
    bool inside = at >= 0 && at < mine->modulo;
    int from = set + (at + mine->modulo) % mine->modulo;
    auto other = from < static_cast<int>(Width) ? static_cast<FillShuffle<T>*>(in[from]) : nullptr;
    if (other) {
      *static_cast<T*>(out[i]) = inside ? other->data : other->fill;
    } else {
      __builtin_memset(out[i], 0xFF, sizeof(T));
    }
  }
}
template <uint Width, class T>
METAL_FUNC T fill_shuffle(const char* kind, T x, T fill, int by, ushort modulo, const char* file,
                          uint line) {
  return collect<Width, T>(kind, FillShuffle<T>{x, fill, by, modulo}, fill_combine<Width, T>, file,
                           line);
}

}  // namespace emulator

MM_SCOPE(simd, kMmScopeSimd)
MM_SCOPE(quad, kMmScopeQuad)
#undef MM_SCOPE
#undef MM_SHUFFLE
#undef MM_PREFIX
#undef MM_REDUCE
METAL_FUNC bool simd_is_helper_thread() { return false; }

// Lanes run one at a time, so that their writes are in order.
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static_assert(static_cast<uint>(mem_flags::mem_threadgroup) == kMmOrdersThreadgroup, "");
METAL_FUNC void threadgroup_barrier(mem_flags flags, MM_SITE) {
  mm_collective(kMmScopeThreadgroup, "threadgroup_barrier", static_cast<uint>(flags), file, line,
                nullptr, nullptr, nullptr);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, MM_SITE) {
  mm_collective(kMmScopeSimd, "simdgroup_barrier", static_cast<uint>(flags), file, line, nullptr,
                nullptr, nullptr);
}

}  // namespace metal
