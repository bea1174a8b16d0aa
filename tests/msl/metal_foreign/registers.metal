// Matrices kept as plain registers, complex numbers with members for every address space, limits as static
// members, kernels from macros without attributes: idioms of several libraries in one file.
#include <metal_stdlib>
#pragma METAL internals : enable

using namespace metal;

namespace metal {
template <typename T>
struct simdgroup_matrix_storage {
  typedef vec<T, 64> storage_type;
  storage_type t;

  METAL_FUNC thread vec<T, 2>* thread_elements() thread {
    return reinterpret_cast<thread vec<T, 2>*>(&t);
  }
  METAL_FUNC simdgroup_matrix_storage() thread = default;
  METAL_FUNC simdgroup_matrix_storage(vec<T, 2> elements) thread { *(this->thread_elements()) = elements; }

  METAL_FUNC static device T* apply_offset(device T* src, uint row_stride, uint2 origin, bool transpose = false) {
    if (transpose) {
      return src + ulong(origin.x * row_stride) + origin.y;
    }
    return src + ulong(origin.y * row_stride) + origin.x;
  }
  template <typename U>
  METAL_FUNC void load(const device U* src, uint row_stride, ushort2 origin, bool transpose = false) {
    if (transpose) {
      U a = src[uint(origin.x + 0) * row_stride + origin.y];
      U b = src[uint(origin.x + 1) * row_stride + origin.y];
      ((thread T*)thread_elements())[0] = T(a);
      ((thread T*)thread_elements())[1] = T(b);
    } else {
      *(thread_elements()) = vec<T, 2>(*(const device vec<U, 2>*)(src + uint(origin.y * row_stride) + origin.x));
    }
  }
  template <typename U>
  METAL_FUNC void store(device U* dst, uint row_stride, ushort2 origin) {
    *(device vec<U, 2>*)(dst + uint(origin.y * row_stride) + origin.x) = vec<U, 2>(thread_elements()[0]);
  }
  template <typename U, typename V>
  METAL_FUNC void multiply(simdgroup_matrix_storage<U> a, simdgroup_matrix_storage<V> b, bool accumulate = true) {
    if (!accumulate) {
      *(thread_elements()) = vec<T, 2>(0);
    }
    t = __metal_simdgroup_matrix_8x8_multiply_accumulate(a.t, b.t, t, typename simdgroup_matrix_storage<T>::storage_type());
  }
};
}  // namespace metal

METAL_FUNC ushort2 morton_order(ushort thread_index_in_simdgroup) {
  ushort lane_id = thread_index_in_simdgroup;
  ushort quad_id = lane_id / 4;
  constexpr ushort QUADRANT_SPAN_M = 4;
  constexpr ushort THREADS_PER_QUADRANT = 8;
  ushort M_floor_of_quadrant = (quad_id / 4) * QUADRANT_SPAN_M;
  ushort M_in_quadrant = (lane_id / 2) % (THREADS_PER_QUADRANT / 2);
  ushort N_floor_of_quadrant = (quad_id & 2) * 2;
  ushort N_in_quadrant = (lane_id % 2) * 2;
  return ushort2(N_floor_of_quadrant + N_in_quadrant, M_floor_of_quadrant + M_in_quadrant);
}

constant uint M [[function_constant(0)]];
constant uint N [[function_constant(1)]];
constant uint K [[function_constant(2)]];
constant bool B_trans [[function_constant(11)]];
constant uint B_leading_dimension = B_trans ? K : N;

kernel void gemm_registers(device half* A [[buffer(0)]], device half* B [[buffer(1)]], device float* C [[buffer(2)]],
                           uint3 gid [[threadgroup_position_in_grid]],
                           ushort sidx [[simdgroup_index_in_threadgroup]],
                           ushort lane_id [[thread_index_in_simdgroup]]) {
  ushort2 morton_offset = morton_order(lane_id);
  uint row = gid.y * 16 + sidx * 8, col = gid.x * 8;
  simdgroup_matrix_storage<float> C_sram = simdgroup_matrix_storage<float>(vec<float, 2>(0));
  A = simdgroup_matrix_storage<half>::apply_offset(A, K, uint2(morton_offset.x, row + morton_offset.y));
#pragma clang loop unroll(disable)
  for (uint k = 0; k < K; k += 8) {
    simdgroup_matrix_storage<half> A_sram, B_sram;
    A_sram.load(A, K, ushort2(k, 0));
    B_sram.load(B_trans ? B + (col + morton_offset.x) * B_leading_dimension + k + morton_offset.y
                        : B + (k + morton_offset.y) * B_leading_dimension + col + morton_offset.x,
                B_leading_dimension, ushort2(0, 0), B_trans);
    C_sram.multiply(A_sram, B_sram);
  }
  C_sram.store(C + (row + morton_offset.y) * N + col + morton_offset.x, N, ushort2(0, 0));
}

struct complex64_t {
  float real;
  float imag;
  constexpr complex64_t(float real, float imag) : real(real), imag(imag) {};
  constexpr complex64_t() : real(0), imag(0) {};
  constexpr complex64_t() threadgroup : real(0), imag(0) {};
  template <typename T, typename = typename enable_if<!is_same_v<T, complex64_t>>::type>
  constexpr operator T() const thread {
    return static_cast<T>(real);
  }
  template <typename T, typename = typename enable_if<!is_same_v<T, complex64_t>>::type>
  constexpr operator T() const threadgroup {
    return static_cast<T>(real);
  }
  template <typename T>
  constexpr operator T() const device {
    return static_cast<T>(real);
  }
};
constexpr complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

template <typename U>
struct Limits {
  static const constant U max = metal::numeric_limits<U>::max();
};
template <>
struct Limits<float> {
  static constexpr constant float max = metal::numeric_limits<float>::infinity();
  static constexpr constant float min = -metal::numeric_limits<float>::infinity();
};

#define REDUCE(FN, TYPENAME)                                                                          \
kernel void FN(constant size_t &el_to_sum, device const TYPENAME *src, device TYPENAME *dst,          \
               uint id [[ thread_position_in_grid ]], uint tid [[ thread_index_in_threadgroup ]],     \
               uint block_dim [[ threads_per_threadgroup ]]) {                                        \
    threadgroup TYPENAME shared_memory[256];                                                          \
    shared_memory[tid] = id < el_to_sum ? src[id] : TYPENAME(Limits<float>::min);                     \
    threadgroup_barrier(mem_flags::mem_none | mem_flags::mem_threadgroup);                            \
    for (uint s = block_dim / 2; s > 0; s >>= 1) {                                                    \
        if (tid < s) {                                                                                \
            shared_memory[tid] = max(shared_memory[tid], shared_memory[tid + s]);                     \
        }                                                                                             \
        threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    }                                                                                                 \
    if (tid == 0) dst[0] = shared_memory[0];                                                          \
}
REDUCE(reduce_max_float, float)
REDUCE(reduce_max_half, half)

kernel void complex_mul(device const complex64_t* a, device const complex64_t* b, device complex64_t* c,
                        uint i [[thread_position_in_grid]]) {
  complex64_t product = a[i] * b[i];
  c[i] = product;
}
