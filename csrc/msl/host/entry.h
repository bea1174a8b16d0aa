// How the emulator calls a kernel: a table of names and roles of arguments that testing.py derives
// from the text.
#pragma once

#include "runtime.h"

namespace metal {
namespace emulator {

enum Role : uint {
  kRoleBuffer,
  kRoleThreadgroup,
  kRoleThreadPositionInGrid,
  kRoleThreadgroupPositionInGrid,
  kRoleThreadPositionInThreadgroup,
  kRoleThreadsPerThreadgroup,
  kRoleThreadsPerGrid,
  kRoleThreadgroupsPerGrid,
  kRoleThreadIndexInThreadgroup,
  kRoleThreadIndexInSimdgroup,
  kRoleSimdgroupIndexInThreadgroup,
  kRoleThreadsPerSimdgroup,
  kRoleSimdgroupsPerThreadgroup,
  kRoleThreadIndexInQuadgroup,
  kRoleQuadgroupIndexInThreadgroup,
  kRoleQuadgroupsPerThreadgroup,
  kRoleZero,
  kRoleOptionalBuffer,
};
struct Argument {
  uint role, index;
  bool is_read_only;
};
struct KernelEntry {
  const char* name;
  void (*run)();  // calls the kernel for the current thread
  uint n_arguments;
  const Argument* arguments;
};
enum ConstantKind : uint { kConstantInteger, kConstantFloat, kConstantHalf, kConstantBfloat };
struct ConstantEntry {
  const char* name;
  uint index, kind, bytes, count;  // `count` values of a kind
  void* storage;
};

extern "C" {
void* mm_argument_memory(uint role, uint index);
void mm_argument_value(uint role, uint* xyz);
}

template <class P>
METAL_FUNC P argument(Argument a) {
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
  static METAL_FUNC P of(Argument a) { return argument<P>(a); }
};
template <class R>
struct Passed<R&> {
  static METAL_FUNC R& of(Argument a) { return *(R*)mm_argument_memory(a.role, a.index); }
};

template <class T, T... I>
struct Indices {};
template <class... P, int... I>
METAL_FUNC void call(void (*f)(P...), const Argument* a, Indices<int, I...>) {
  (void)a;
  f(Passed<P>::of(a[I])...);
}
template <class... P>
METAL_FUNC void call(void (*f)(P...), const Argument* a) {
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
constexpr uint constant_kind() {
  using U = element_t<T>;
  return __is_same(U, float)    ? kConstantFloat
         : __is_same(U, half)   ? kConstantHalf
         : __is_same(U, bfloat) ? kConstantBfloat
                                : kConstantInteger;
}
template <class T>
constexpr uint constant_count() {
  return vector_of<T>::size;
}

}  // namespace emulator
}  // namespace metal
