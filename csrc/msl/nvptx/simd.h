// <metal_simdgroup> and <metal_quadgroup> on NVIDIA GPUs, and the barriers.
#pragma once

#include "runtime.h"
#include "warp/simd.h"

namespace metal {

// Both barriers order device and threadgroup memory, whatever the flags.
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(warp::kAll); }

}  // namespace metal
