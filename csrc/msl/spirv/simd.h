// <metal_simdgroup> and <metal_quadgroup> as subgroups of OpenCL, and the barriers. An Apple GPU
// has an instruction for a reduction over its simdgroup and for an exchange with lane n ^ m.
#pragma once

#include "runtime.h"
#include "warp/simd.h"

namespace metal {
namespace warp {

#define MM_MACHINE_REDUCE(Op, T, name)                  \
  template <>                                           \
  METAL_FUNC T reduce<32, simd_operators::Op, T>(T x) { \
    return sub_group_reduce_##name(x);                  \
  }
#define MM_MACHINE_REDUCES(T)         \
  MM_MACHINE_REDUCE(Sum, T, add)      \
  MM_MACHINE_REDUCE(Smallest, T, min) \
  MM_MACHINE_REDUCE(Largest, T, max)
MM_MACHINE_REDUCES(float)
MM_MACHINE_REDUCES(uint)
#undef MM_MACHINE_REDUCES
#undef MM_MACHINE_REDUCE

}  // namespace warp

#define MM_MACHINE_EXCHANGE(T)                      \
  template <>                                       \
  METAL_FUNC T simd_shuffle_xor<T>(T x, ushort n) { \
    return warp::from_lane_xor(x, n);               \
  }                                                 \
  template <>                                       \
  METAL_FUNC T simd_shuffle<T>(T x, ushort n) {     \
    return warp::from_lane(x, n);                   \
  }
MM_MACHINE_EXCHANGE(float)
MM_MACHINE_EXCHANGE(float2)
MM_MACHINE_EXCHANGE(float4)
MM_MACHINE_EXCHANGE(half)
MM_MACHINE_EXCHANGE(half2)
MM_MACHINE_EXCHANGE(half4)
MM_MACHINE_EXCHANGE(uint)
MM_MACHINE_EXCHANGE(int)
MM_MACHINE_EXCHANGE(ushort)
#undef MM_MACHINE_EXCHANGE

// Both barriers order threadgroup and device memory, whatever the flags; the second within a
// subgroup (scope 3, acquire and release of workgroup memory).
METAL_FUNC void threadgroup_barrier(mem_flags) { barrier(3); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __spirv_ControlBarrier(3, 3, 0x108); }

}  // namespace metal
