// Argument checks that every engine shares. They run before any work; each error names the
// argument, what was given and what is allowed, and is a ValueError in Python (IndexError for ids).
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>

#include "format.h"

namespace metalmm {

const Format& check_format(std::string_view name);

// A packed weight: uint8 [N, row_bytes(k)], or for a dense format [N, k] of its dtype. Returned as
// uint8 with dense rows.
at::Tensor check_weight(const char* name, const at::Tensor& weight, const Format& format, int64_t k,
                        const at::Tensor& x);

// x, f32 / f16 / bf16 with at least one dimension. Returns its last size, K.
int64_t check_activations(const char* name, const at::Tensor& x);

// A floating tensor of exactly this shape on the device of x, or nothing.
void check_addend(const char* name, const std::optional<at::Tensor>& t, at::IntArrayRef shape,
                  const at::Tensor& x);

// K of a packed weight whose caller did not say: the one K that has this many bytes per row. The
// padding of an affine row can leave several, and then in_features must be given.
int64_t resolve_in_features(const at::Tensor& weight, const Format& format,
                            std::optional<int64_t> in_features);

// The dtype of decoded values: f32 unless given; f32, f16 or bf16.
at::ScalarType check_dtype(std::optional<at::ScalarType> dtype);

}  // namespace metalmm
