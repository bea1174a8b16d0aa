// How the emulator calls a kernel, and what a table says of one: for the text that
// torch_metalmm/msl/tables.py writes.
#pragma once

#include "runtime.h"

namespace metal {
namespace emulator {

template <class P>
METAL_FUNC P argument(MmArgument a) {
  if constexpr (__is_pointer(P)) {
    return (P)mm_argument_memory(a.role, a.index);
  } else {
    uint v[3];
    mm_argument_value(a.role, v);
    if constexpr (vector_of<P>::size == 1) {
      return static_cast<P>(v[0]);
    } else {
      P p{};
      for (int i = 0; i < vector_of<P>::size; ++i) {
        p[i] = static_cast<element_t<P>>(v[i]);
      }
      return p;
    }
  }
}
template <class P>
struct Passed {
  static METAL_FUNC P of(MmArgument a) { return argument<P>(a); }
};
template <class R>
struct Passed<R&> {
  static METAL_FUNC R& of(MmArgument a) { return *(R*)mm_argument_memory(a.role, a.index); }
};

template <class T, T... I>
struct Indices {};
template <class... P, int... I>
METAL_FUNC void call(void (*f)(P...), const MmArgument* a, Indices<int, I...>) {
  (void)a;
  f(Passed<P>::of(a[I])...);
}
template <class... P>
METAL_FUNC void call(void (*f)(P...), const MmArgument* a) {
  call(f, a, __make_integer_seq<Indices, int, sizeof...(P)>{});
}
// Whether parameter I of a kernel points or refers to const memory.
template <uint I, class... P>
constexpr bool is_read_only(void (*)(P...)) {
  return __is_const(__remove_pointer(__remove_reference_t(__type_pack_element<I, P...>)));
}
template <class T>
T value_of(T);
template <class T>
constexpr MmConstantKind constant_kind() {
  using U = element_t<T>;
  return __is_same(U, float)    ? kMmFloat
         : __is_same(U, half)   ? kMmHalf
         : __is_same(U, bfloat) ? kMmBfloat
                                : kMmInteger;
}
template <class T>
constexpr uint constant_count() {
  return vector_of<T>::size;
}

}  // namespace emulator
}  // namespace metal
