// <metal_simdgroup_matrix> on NVIDIA GPUs. With the lanes of runtime.h a matrix is a fragment of
// mma.sync: lane 4 r + c / 2 of the warp holds elements c and c + 1 of row r.
//
// half * half + float runs on the tensor cores: products are exact, sums of 16 are aligned and cut
// off by the hardware, in no stated order. Everything else is 8 fused multiply-adds in f32 in the
// order of k, as in the emulator, the operands exchanged between lanes.
//
// The tensor cores take 16 values of k at a time, so a product of two matrices waits in its sum for
// the next product or for a reader. After inlining the compiler knows which sums wait.
#pragma once

#include "simd.h"

#ifdef MM_MATRIX_LANES

namespace metal {
namespace warp {

METAL_FUNC uint matrix_row() { return __nvvm_read_ptx_sreg_tid_x() % kWidth / 4; }
METAL_FUNC uint matrix_column() { return __nvvm_read_ptx_sreg_tid_x() % 4 * 2; }

// The fragment of the transposed matrix.
METAL_FUNC uint transposed(uint fragment) {
  uint out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
  return out;
}

// Fragments of two half matrices to be multiplied, that of the right one transposed.
struct Fragments {
  uint left, right;
};

// c + first + second: the upper half of a 16 x 16 by 16 x 8 product.
METAL_FUNC vec<float, 2> add_products(Fragments first, Fragments second, vec<float, 2> c) {
  vec<float, 2> d;
  float lower[2];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d.x), "=f"(d.y), "=f"(lower[0]), "=f"(lower[1])
      : "r"(first.left), "r"(0), "r"(second.left), "r"(0), "r"(first.right), "r"(second.right),
        "f"(c.x), "f"(c.y), "f"(0.0f), "f"(0.0f));
  return d;
}

template <class T>
METAL_FUNC T from_hardware_lane(T x, uint from) {
  const int lane = static_cast<int>(from);
  return by_words(x, [=](uint w) {
    return static_cast<uint>(__nvvm_shfl_sync_idx_i32(kAll, static_cast<int>(w), lane, 31));
  });
}

}  // namespace warp

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "Metal has 8 x 8 simdgroup matrices only");
  static_assert(is_floating_point_v<T>, "simdgroup matrices are of half, bfloat or float");
  using element_type = T;
  vec<T, 2> elements;  // without the product that waits
  // The lane's fragment of the transposed matrix, where memory gave it: what is not used is not
  // loaded.
  vec<T, 2> mirror;
  warp::Fragments waiting;
  bool has_mirror = false, waits = false;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint e = 0; e < 2; ++e) {
      const bool on = warp::matrix_row() == warp::matrix_column() + e;
      elements[e] = on ? diagonal : static_cast<T>(0);
    }
  }
  METAL_FUNC vec<T, 2> whole() const {
    if constexpr (is_same_v<T, float>) {
      if (waits) return warp::add_products(waiting, {0, 0}, elements);
    }
    return elements;
  }
  METAL_FUNC thread vec<T, 2>& thread_elements() {
    elements = whole();
    has_mirror = waits = false;
    return elements;
  }
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = m.mirror = static_cast<vec<T, 2>>(value);
  m.has_mirror = true;
  return m;
}
template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

// Element (row, column) of m is at p[(origin.y + row) * stride + origin.x + column], transposed
// with row and column exchanged.
#define MM_MATRIX_MEMORY(space)                                                              \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p,      \
                                 ulong stride = 8, ulong2 origin = ulong2{0, 0},             \
                                 bool transposed = false) {                                  \
    const ulong row = warp::matrix_row(), column = warp::matrix_column();                    \
    p += origin.y * stride + origin.x;                                                       \
    vec<T, 2> along, across;                                                                 \
    for (ulong e = 0; e < 2; ++e) {                                                          \
      along[e] = p[row * stride + column + e];                                               \
      across[e] = p[(column + e) * stride + row];                                            \
    }                                                                                        \
    m.elements = transposed ? across : along;                                                \
    m.mirror = transposed ? along : across;                                                  \
    m.has_mirror = true;                                                                     \
    m.waits = false;                                                                         \
  }                                                                                          \
  template <class T>                                                                         \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* p, ulong stride = 8, \
                                  ulong2 origin = ulong2{0, 0}, bool transposed = false) {   \
    const ulong row = warp::matrix_row(), column = warp::matrix_column();                    \
    const vec<T, 2> v = m.whole();                                                           \
    p += origin.y * stride + origin.x;                                                       \
    for (ulong e = 0; e < 2; ++e) {                                                          \
      p[transposed ? (column + e) * stride + row : row * stride + column + e] = v[e];        \
    }                                                                                        \
  }
MM_MATRIX_MEMORY(device)
MM_MATRIX_MEMORY(threadgroup)
#undef MM_MATRIX_MEMORY

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<C, 8, 8> c) {
  d.has_mirror = d.waits = false;
  if constexpr (is_same_v<A, half> && is_same_v<B, half> && is_same_v<C, float> &&
                is_same_v<D, float>) {
    const uint right =
        b.has_mirror ? as_type<uint>(b.mirror) : warp::transposed(as_type<uint>(b.elements));
    const warp::Fragments product = {as_type<uint>(a.elements), right};
    if (c.waits) {
      d.elements = warp::add_products(c.waiting, product, c.elements);
    } else {
      d.elements = c.elements;
      d.waiting = product;
      d.waits = true;
    }
  } else {
    const vec<A, 2> left = a.whole();
    const vec<B, 2> right = b.whole();
    const uint row = warp::matrix_row() * 4, column = warp::matrix_column() / 2;
    vec<float, 2> sum = construct<vec<float, 2>>(c.whole());
#pragma clang loop unroll(full)
    for (uint k = 0; k < 8; k += 2) {
      const vec<A, 2> x = warp::from_hardware_lane(left, row + k / 2);
#pragma clang loop unroll(full)
      for (uint j = 0; j < 2; ++j) {
        const vec<B, 2> y = warp::from_hardware_lane(right, (k + j) * 4 + column);
        sum.x = fma(static_cast<float>(x[j]), static_cast<float>(y.x), sum.x);
        sum.y = fma(static_cast<float>(x[j]), static_cast<float>(y.y), sum.y);
      }
    }
    // A matrix unit takes its operands when it multiplies. Without the barrier ptxas starts the
    // exchanges of all products first: gemm_small, q4_k, f32 x, 8 rows: 144 bytes of spills at 128
    // registers instead of none.
    asm volatile("bar.warp.sync 0xffffffff;" : "+f"(sum.x), "+f"(sum.y));
    d.elements = construct<vec<D, 2>>(sum);
  }
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(static_cast<D>(0)));
}

}  // namespace metal

#endif  // MM_MATRIX_LANES
