// Products of packed rows under the names of ggml's kernels: sizes in a struct, tensors as bytes,
// decoders as template arguments, instances by the type of one, threadgroup memory of which the
// host says the size.
#include <metal_stdlib>
using namespace metal;

#define EACH(i, n) _Pragma("clang loop unroll(full)") for (short i = 0; i < (n); ++i)

struct Shape {
  int k, n, m;  // y [m, n] = x [m, k] W [n, k]ᵀ; k is a multiple of 32
  int row_bytes;
};

struct Q4_0 {
  half scale;
  uchar codes[16];  // of value i the low half of byte i, of value 16 + i the high one
};

constant short kRows = 2;

kernel void kernel_mul_mv_q4_0_f32(constant Shape& shape, device const char* w,
                                   device const char* x, device char* y,
                                   uint3 at [[threadgroup_position_in_grid]],
                                   ushort lane [[thread_index_in_simdgroup]]) {
  device const float* values = (device const float*)x + at.y * shape.k;
  float sums[kRows] = {};
  for (int b = lane; b < shape.k / 32; b += 32) {
    EACH(r, kRows) {
      const int row = min(int(at.x) * kRows + r, shape.n - 1);
      device const Q4_0& block = ((device const Q4_0*)(w + row * shape.row_bytes))[b];
      float sum = 0;
      EACH(i, 16) {
        sum = fma(values[32 * b + i], float(block.codes[i] & 15) - 8, sum);
        sum = fma(values[32 * b + 16 + i], float(block.codes[i] >> 4) - 8, sum);
      }
      sums[r] = fma(float(block.scale), sum, sums[r]);
    }
  }
  EACH(r, kRows) {
    const float sum = simd_sum(sums[r]);
    const int row = at.x * kRows + r;
    if (lane == 0 && row < shape.n) ((device float*)y)[at.y * shape.n + row] = sum;
  }
}

void decode_q4_0(device const Q4_0* block, short part, thread half4x4& out) {
  EACH(i, 16) {
    const uchar code = part ? block->codes[i] >> 4 : block->codes[i] & 15;
    out[i / 4][i % 4] = block->scale * half(code - 8);
  }
}

template <typename T>
void decode_plain(device const T* block, short, thread half4x4& out) {
  out = (half4x4)*block;
}

// A simdgroup makes 8 rows of y in 16 columns. kParts: parts of 16 values in a block.
template <typename Block, short kParts, void (*decode)(device const Block*, short, thread half4x4&)>
kernel void kernel_mul_mm(constant Shape& shape, device const char* w, device const char* x,
                          device char* y, threadgroup char* memory [[threadgroup(0)]],
                          uint3 at [[threadgroup_position_in_grid]],
                          ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup half* ws = (threadgroup half*)memory;           // [32 of k][16 of n]
  threadgroup half* xs = (threadgroup half*)(memory + 1024);  // [8 of m][32 of k]
  const int column = at.x * 16, row = at.y * 8;
  const short part = lane % 2, quarter = lane % 4 * 8;
  device const Block* blocks =
      (device const Block*)(w + min(column + lane / 2, shape.n - 1) * shape.row_bytes);
  device const float* values = (device const float*)x + min(row + lane / 4, shape.m - 1) * shape.k;
  simdgroup_float8x8 sums[2];
  EACH(j, 2) sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0);
  for (int k = 0; k < shape.k; k += 32) {
    half4x4 decoded;
    decode(blocks + (k / 16 + part) / kParts, part, decoded);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    EACH(i, 16) ws[(16 * part + i) * 16 + lane / 2] = decoded[i / 4][i % 4];
    EACH(i, 8) xs[lane / 4 * 32 + quarter + i] = half(values[k + quarter + i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    EACH(step, 4) {
      simdgroup_half8x8 a, b;
      simdgroup_load(a, xs + 8 * step, 32);
      EACH(j, 2) {
        simdgroup_load(b, ws + 128 * step + 8 * j, 16);
        simdgroup_multiply_accumulate(sums[j], a, b, sums[j]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* results = (threadgroup float*)memory;  // [8 of m][16 of n]
  EACH(j, 2) simdgroup_store(sums[j], results + 8 * j, 16);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (short i = lane; i < 128; i += 32) {
    const int r = row + i / 16, c = column + i % 16;
    if (r < shape.m && c < shape.n) ((device float*)y)[r * shape.n + c] = results[i];
  }
}

typedef decltype(kernel_mul_mm<Q4_0, 2, decode_q4_0>) Product;
template [[host_name("kernel_mul_mm_q4_0_f32")]] kernel Product kernel_mul_mm<Q4_0, 2, decode_q4_0>;
template [[host_name(
    "kernel_mul_mm_f16_f32")]] kernel Product kernel_mul_mm<half4x4, 1, decode_plain<half4x4>>;
