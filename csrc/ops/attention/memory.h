// Memory of the tensors that an op writes: whether an element is written twice, or also read.
#pragma once

#include "ops/args.h"

namespace metalmm {

// ValueError where two elements of a tensor that is written lie at one place.
void check_places(const char* name, const at::Tensor& written);

// ValueError where an element of `written` lies in what is read.
void check_apart(const char* name, const at::Tensor& written, const char* other,
                 const OptionalTensor& read);
template <class Written, class Kind>
void check_apart(const Field<Written>& written, const Field<Kind>& read) {
  if constexpr (is_tensor<Kind> && !is_written<Kind>) {
    check_apart(written.name, written.value, read.name, read.value);
  }
}

template <class Kind, class... Kinds>
void check_field(const Field<Kind>& one, const Field<Kinds>&... all) {
  if constexpr (is_written<Kind>) {
    check_places(one.name, one.value);
    (check_apart(one, all), ...);
  }
}

// Both checks, of every tensor that ops.def says is written, and every one that is not. For tensors
// with memory, on any device.
template <class Args>
void check_written(const Args& a) {
  with_fields(a, [](const Args&, const auto&... field) { (check_field(field, field...), ...); });
}

// Both checks of keys and values, which may be one tensor where v is k.
void check_memory(const args::cache_append& a);
void check_memory(const args::rope_append& a);

}  // namespace metalmm
