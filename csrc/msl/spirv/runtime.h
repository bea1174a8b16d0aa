// A shader as an OpenCL kernel in SPIR-V, which a driver's compiler turns into code of an Apple
// GPU: where a thread is, and the lanes of a subgroup.
#pragma once

#include "language/types.h"

// Built-ins of OpenCL, by whose mangled names the SPIR-V backend knows them.
#define MM_CONVERGENT __attribute__((convergent))
unsigned long get_group_id(unsigned);
unsigned long get_local_id(unsigned);
unsigned get_sub_group_id();
unsigned get_sub_group_local_id();
MM_CONVERGENT void barrier(unsigned);
MM_CONVERGENT void __spirv_ControlBarrier(int, int, int);
MM_CONVERGENT unsigned sub_group_shuffle(unsigned, unsigned);
MM_CONVERGENT unsigned sub_group_shuffle_xor(unsigned, unsigned);
MM_CONVERGENT float sub_group_reduce_add(float);
MM_CONVERGENT float sub_group_reduce_max(float);
MM_CONVERGENT float sub_group_reduce_min(float);
MM_CONVERGENT unsigned sub_group_reduce_add(unsigned);
MM_CONVERGENT unsigned sub_group_reduce_max(unsigned);
MM_CONVERGENT unsigned sub_group_reduce_min(unsigned);
float native_exp2(float);
float native_log2(float);
float native_rsqrt(float);
float native_sqrt(float);

namespace metal {
namespace warp {

METAL_FUNC uint lane() { return get_sub_group_local_id(); }
METAL_FUNC uint word_from_lane(uint word, uint lane) { return sub_group_shuffle(word, lane); }
METAL_FUNC uint word_from_lane_xor(uint word, uint mask) {
  return sub_group_shuffle_xor(word, mask);
}

}  // namespace warp
}  // namespace metal
