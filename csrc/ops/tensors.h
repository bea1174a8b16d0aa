// Shapes and layouts of the tensors of a call, as every engine takes them.
#pragma once

#include <algorithm>

#include "aten.h"
#include "plan/matmul/torch.h"

namespace metalmm {

// The elements of a dense tensor whose dtype is that of T. Not t.const_data_ptr<T>(), whose name in
// the libraries of torch 2.10 and 2.11 for macOS is not the one that clang 18 and later look for.
template <class T>
const T* elements(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

// Whether the host may read the elements of a tensor: not those of another device, nor those of the
// fakes and wrappers of a trace, which call themselves CPU tensors and have no memory.
inline bool holds_values(const at::Tensor& t) {
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchBatched});
  return t.key_set().has_backend(c10::BackendComponent::CPUBit) && t.has_storage() &&
         !t.key_set().has_any(wrappers);
}

// x [..., K] as [M, K] in `dtype`, the last dimension dense; a view where it can be.
inline at::Tensor as_rows(const at::Tensor& x, at::ScalarType dtype) {
  const int64_t k = x.size(-1);
  const int64_t m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  at::Tensor rows = x.dim() == 2 ? x : x.reshape({m, k});
  if (rows.scalar_type() != dtype) rows = rows.to(dtype);
  return rows.stride(1) == 1 || k <= 1 ? rows : rows.contiguous();
}

// t as the result of an op, in `dtype`: of its own memory and with the strides of a new tensor,
// which the fake has. contiguous() would leave any strides to dimensions of size 1.
inline at::Tensor stored(const at::Tensor& t, at::ScalarType dtype) {
  return t.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
}

// y [M, n] as [..., n] in the dtype of x, with the leading dimensions of x. Where y is the caller's
// last handle, it gets the other shape itself: a view takes a token's small products 1 us each.
inline at::Tensor like_input(at::Tensor y, const at::Tensor& x) {
  c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = y.size(1);
  if (y.use_count() == 1 && y.is_contiguous()) {
    y.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  } else {
    y = y.view(shape);
  }
  return y.scalar_type() == x.scalar_type() ? y : y.to(x.scalar_type());
}

// Rows of K values that are decoded at a time where a whole dense W is never wanted: 32 MB of f32.
inline int64_t streamed_rows(int64_t k, int64_t values = 8 << 20) {
  return std::max<int64_t>(1, values / std::max<int64_t>(k, 1));
}

// g W of f32 g [M, N] and W [N, K], of which decode(first, last) gives rows, f32.
template <class Decode>
at::Tensor times_decoded(const at::Tensor& g, int64_t k, Decode decode) {
  at::Tensor out = at::zeros({g.size(0), k}, g.options());
  const int64_t n = g.size(1), most = std::min(streamed_rows(k), kMostInner);
  for (int64_t r = 0; r < n; r += most) {
    const int64_t last = std::min(n, r + most);
    out.addmm_(g.narrow(1, r, last - r), decode(r, last));
  }
  return out;
}

}  // namespace metalmm
