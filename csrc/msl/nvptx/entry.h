// How the CUDA launcher calls a kernel: all have the same parameters, of which one reads what it
// declares. torch_metalmm/msl/ptx.py writes an entry for each; csrc/cuda/launch.cpp passes them.
#pragma once

#include "operands.h"
#include "runtime.h"

// The dynamic shared memory of the launch.
extern "C" threadgroup float4 mm_threadgroup_memory[];

namespace metal {
namespace warp {

using Operands = metalmm::Operands<device void*>;

// 1: the grid is launched as one row, for CUDA's y and z end at 65535. A function constant.
constant uint linear_grid [[function_constant(linear_grid)]];

struct Pointer {
  device void* address;
  template <class T>
  METAL_FUNC operator device T*() const {
    return (device T*)address;
  }
};

// The operand of a kernel for [[buffer(slot)]]: a pointer, or the arguments.
template <uint slot>
METAL_FUNC decltype(auto) buffer(const Operands& operands, const metalmm::KernelArgs& args) {
  if constexpr (slot == metalmm::kSlotArgs) {
    return *(constant metalmm::KernelArgs*)&args;
  } else {
    return Pointer{operands.slots[slot]};
  }
}

METAL_FUNC uint3 threadgroup_position_in_grid(const Operands& operands) {
  const uint x = __nvvm_read_ptx_sreg_ctaid_x();
  if (linear_grid != 0) {
    const uint row = x / operands.width;
    return uint3{x % operands.width, row % operands.height, row / operands.height};
  }
  return construct<uint3>(x, __nvvm_read_ptx_sreg_ctaid_y(), __nvvm_read_ptx_sreg_ctaid_z());
}
METAL_FUNC uint simdgroup_index_in_threadgroup() {
  return static_cast<uint>(__nvvm_read_ptx_sreg_tid_x()) / kWidth;
}
METAL_FUNC uint thread_index_in_threadgroup() {
  return simdgroup_index_in_threadgroup() * kWidth + lane();
}

}  // namespace warp
}  // namespace metal
