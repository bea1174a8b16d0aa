// How a kernel of Metal becomes an OpenCL kernel (torch_metalmm/msl/spirv.py writes the entry):
// its buffers are the parameters, each of the type that the kernel gives it.
#pragma once

#include "language/traits.h"
#include "runtime.h"

namespace metal {
namespace warp {

template <class T>
struct Parameter {
  using type = T;
  static METAL_FUNC T pass(T pointer) { return pointer; }
};
// A reference is a pointer: OpenCL's kernels take none.
#define MM_REFERENCE(space)                                                \
  template <class T>                                                       \
  struct Parameter<space T&> {                                             \
    using type = space T*;                                                 \
    static METAL_FUNC space T& pass(space T* pointer) { return *pointer; } \
  };
MM_REFERENCE(device)
MM_REFERENCE(constant)
#undef MM_REFERENCE

template <uint at, class F>
struct NthParameter;
template <class First, class... Rest>
struct NthParameter<0, void(First, Rest...)> : Parameter<First> {};
template <uint at, class First, class... Rest>
struct NthParameter<at, void(First, Rest...)> : NthParameter<at - 1, void(Rest...)> {};

METAL_FUNC uint3 threadgroup_position_in_grid() {
  return construct<uint3>(get_group_id(0), get_group_id(1), get_group_id(2));
}
METAL_FUNC uint simdgroup_index_in_threadgroup() { return get_sub_group_id(); }
METAL_FUNC uint thread_index_in_threadgroup() { return static_cast<uint>(get_local_id(0)); }

}  // namespace warp
}  // namespace metal
