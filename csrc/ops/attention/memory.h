// Memory of the tensors that an op writes: whether an element is written twice, or also read.
#pragma once

#include <initializer_list>
#include <utility>

#include "ops/args.h"

namespace metalmm {

// Whether two tensors have a byte in common, by their storages, strides and sizes alone.
bool shares_memory(const at::Tensor& a, const at::Tensor& b);

using NamedTensor = std::pair<const char*, OptionalTensor>;

// ValueError where two elements of a tensor that is written lie at one place, or where one lies in
// what is read.
void check_written(const char* name, const at::Tensor& t, std::initializer_list<NamedTensor> read);

// Keys and values, which the ops on a cache write, and what else a call reads: ValueError where two
// elements that are written lie at one place, or where one lies in what is read. For tensors with
// memory, on any device. Keys and values may be one tensor where v is k.
void check_memory(const args::cache_append& a);
void check_memory(const args::rope_append& a);

}  // namespace metalmm
