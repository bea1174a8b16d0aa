// Memory of the tensors that an op writes: whether an element is written twice, or also read.
#pragma once

#include "calls.h"

namespace metalmm {

// Whether two tensors have a byte in common, by their storages, strides and sizes alone.
bool shares_memory(const at::Tensor& a, const at::Tensor& b);

// Keys and values, which the ops on a cache write, and what else a call reads: ValueError where two
// elements that are written lie at one place, or where one lies in what is read. For tensors with
// memory, on any device. Keys and values may be one tensor where v is k.
void check_memory_of_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& slots);
void check_memory_of_rope_append(const at::Tensor& keys, const at::Tensor& values,
                                 const at::Tensor& qkv, const at::Tensor& cos,
                                 const at::Tensor& sin, const at::Tensor& slots,
                                 const RopeOptions& options);

}  // namespace metalmm
