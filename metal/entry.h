// Kernel entries: function constants, and the macros that turn a struct with a static run() into a
// kernel. All [[attributes]] live here. Each header that uses its names includes it, so that
// no order of includes is asked for.
#pragma once

#include <metal_stdlib>

#include "abi.h"
#include "geometry.h"

// a * b + c rounds twice. Safe math lets a compiler contract within a statement, and nothing but
// the text tells the compiler of the driver not to: MTLCompileOptions has no such property. Metal's
// pragmas are of Metal 3.2, and in macOS 14 they may be unknown; STDC is clang's own, of every
// version.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#pragma STDC FP_CONTRACT OFF

#define MM_UNROLL _Pragma("clang loop unroll(full)")

// At global scope: whether Apple's compiler takes function constants in a namespace is not known.
using namespace metalmm;
constant uint fc_k [[function_constant(kConstantK)]];
constant uint fc_group [[function_constant(kConstantGroup)]];
constant uint fc_scale_type [[function_constant(kConstantScaleType)]];
constant uint fc_epilogue [[function_constant(kConstantEpilogue)]];
constant uint fc_batch [[function_constant(kConstantBatch)]];
constant uint fc_bounds [[function_constant(kConstantBounds)]];

namespace metalmm {

using namespace metal;

METAL_FUNC bool has_n_tail() { return (fc_bounds & kBoundsN) != 0; }
METAL_FUNC bool has_m_tail() { return (fc_bounds & kBoundsM) != 0; }
METAL_FUNC bool has_k_tail() { return (fc_bounds & kBoundsK) != 0; }
METAL_FUNC bool x_is_aligned() { return (fc_bounds & kBoundsAlignedX) != 0; }
METAL_FUNC bool weight_is_aligned() { return (fc_bounds & kBoundsAlignedWeight) != 0; }
METAL_FUNC bool rows_are_packed() { return (fc_bounds & kBoundsPackedRows) != 0; }
METAL_FUNC bool has_word_blocks() { return (fc_bounds & kBoundsWordBlocks) != 0; }
METAL_FUNC bool has_long_blocks() { return (fc_bounds & kBoundsLongBlocks) != 0; }
METAL_FUNC bool x_is_arranged() { return (fc_bounds & kBoundsArrangedX) != 0; }
METAL_FUNC bool keeps_subnormals() { return (fc_bounds & kBoundsSubnormals) != 0; }

METAL_FUNC bool has_norm() { return (fc_epilogue & kEpilogueNorm) != 0; }
METAL_FUNC bool norm_has_weight() { return (fc_epilogue & kEpilogueNormWeight) != 0; }
METAL_FUNC bool norm_has_offset() { return (fc_epilogue & kEpilogueNormOffset) != 0; }

// The place of a thread: its threadgroup in the grid, its index there, its simdgroup and lane.
struct Position {
  uint3 tg;
  uint index, sg, lane;
};

// Rows of x, and the weight of their norm.
template <class T>
struct Activations {
  device const T* x;
  device const T* norm;
};

// The destination of results, and what joins them on the way: y = alpha * acc + bias + beta * c.
template <class T>
struct Result {
  device T* y;
  device const T* bias;
  device const T* c;
};

}  // namespace metalmm

// A kernel is its slots (abi.h) in parentheses, then what every kernel has. `memory` is the
// threadgroup memory of the plan. The last argument is the statement that calls run().
#define MM_IN(type, name, slot) device const type* name [[buffer(metalmm::slot)]]
#define MM_OUT_TO(type, name, slot) device type* name [[buffer(metalmm::slot)]]
#define MM_OUT(type) MM_OUT_TO(type, y, kSlotY)
#define MM_RESULT(type) MM_OUT(type), MM_IN(type, bias, kSlotBias), MM_IN(type, c, kSlotC)
#if defined(MM_STAND_IN)  // where `threadgroup` is a macro, it cannot be an attribute
#define MM_MEMORY
#else
#define MM_MEMORY [[threadgroup(0)]]
#endif
#define MM_LIST(...) __VA_ARGS__
#define MM_KERNEL(name, slots, ...)                                                          \
  kernel void name(                                                                          \
      MM_LIST slots, constant metalmm::KernelArgs& args [[buffer(metalmm::kSlotArgs)]],      \
      threadgroup float4* memory MM_MEMORY, uint3 tg [[threadgroup_position_in_grid]],       \
      uint thread_index [[thread_index_in_threadgroup]],                                     \
      uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) { \
    const metalmm::Position at = {tg, thread_index, sg, lane};                               \
    __VA_ARGS__;                                                                             \
  }

// M(dtype, T, ...) for each dtype of x and y; or for MM_ONLY_DTYPE alone, and each.h has
// MM_ONLY_FORMAT: the one kernel that a compilation at run time wants.
#define MM_DTYPE_f32(M, ...) M(f32, float, __VA_ARGS__)
#define MM_DTYPE_f16(M, ...) M(f16, half, __VA_ARGS__)
#define MM_DTYPE_bf16(M, ...) M(bf16, bfloat, __VA_ARGS__)
#if defined(MM_ONLY_DTYPE)
#define MM_JOIN_EXPANDED(a, b) a##b
#define MM_JOIN(a, b) MM_JOIN_EXPANDED(a, b)
#define MM_EACH_DTYPE(M, ...) MM_JOIN(MM_DTYPE_, MM_ONLY_DTYPE)(M, __VA_ARGS__)
#else
#define MM_EACH_DTYPE(M, ...) \
  MM_DTYPE_f32(M, __VA_ARGS__) MM_DTYPE_f16(M, __VA_ARGS__) MM_DTYPE_bf16(M, __VA_ARGS__)
#endif

// Kernel<Struct, T>::run(x, weight, result, args, memory, at) as strategy_format_dtype.
#define MM_MATMUL(dtype, T, strategy, format, Struct, Kernel)                       \
  MM_KERNEL(strategy##_##format##_##dtype,                                          \
            (MM_IN(T, x, kSlotX), MM_IN(uchar, weight, kSlotWeight), MM_RESULT(T)), \
            metalmm::Kernel<metalmm::Struct, T>::run(x, weight, {y, bias, c}, args, memory, at))
// MM_MATMUL with x that may be normalised: run({x, norm}, weight, result, args, memory, at).
#define MM_GEMV(dtype, T, strategy, format, Struct, Kernel)                               \
  MM_KERNEL(                                                                              \
      strategy##_##format##_##dtype,                                                      \
      (MM_IN(T, x, kSlotX), MM_IN(T, norm, kSlotNorm), MM_IN(uchar, weight, kSlotWeight), \
       MM_RESULT(T)),                                                                     \
      metalmm::Kernel<metalmm::Struct, T>::run({x, norm}, weight, {y, bias, c}, args, memory, at))
// MM_MATMUL with x that may lie in the order of lanes: run(x, arranged, weight, ...).
#define MM_ARRANGED(dtype, T, strategy, format, Struct, Kernel)                                   \
  MM_KERNEL(strategy##_##format##_##dtype,                                                        \
            (MM_IN(T, x, kSlotX), MM_IN(T, arranged, kSlotY2), MM_IN(uchar, weight, kSlotWeight), \
             MM_RESULT(T)),                                                                       \
            metalmm::Kernel<metalmm::Struct, T>::run(x, arranged, weight, {y, bias, c}, args,     \
                                                     memory, at))
// MM_MATMUL of experts: run(x, ids, weight, result, args, memory, at).
#define MM_EXPERTS(dtype, T, strategy, format, Struct, Kernel)                             \
  MM_KERNEL(                                                                               \
      strategy##_##format##_##dtype,                                                       \
      (MM_IN(T, x, kSlotX), MM_IN(long, ids, kSlotIds), MM_IN(uchar, weight, kSlotWeight), \
       MM_RESULT(T)),                                                                      \
      metalmm::Kernel<metalmm::Struct, T>::run(x, ids, weight, {y, bias, c}, args, memory, at))
// Kernel<Struct, T>::run(operands, y, args, memory, at) of a cache as strategy_format_dtype.
#define MM_ATTENTION(dtype, T, strategy, format, Struct, Kernel)                                 \
  MM_KERNEL(                                                                                     \
      strategy##_##format##_##dtype,                                                             \
      (MM_IN(T, q, kSlotX), MM_IN(uchar, keys, kSlotWeight), MM_IN(uchar, values, kSlotWeight2), \
       MM_IN(uchar, mask, kSlotC), MM_IN(T, sinks, kSlotBias), MM_IN(long, length, kSlotIds),    \
       MM_IN(long, pages, kSlotX2), MM_OUT(T)),                                                  \
      metalmm::Kernel<metalmm::Struct, T>::run({q, keys, values, mask, sinks, length, pages}, y, \
                                               args, memory, at))
