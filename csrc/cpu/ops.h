// What other engines take from the CPU's: there is one quantizer.
#pragma once

#include <ATen/ATen.h>

#include <string_view>

namespace metalmm::cpu {

// w f32 / f16 / bf16 [N, K] on the CPU -> uint8 [N, row_bytes]. ValueError on NaN or Inf.
at::Tensor quantize(const at::Tensor& w, std::string_view format);

}  // namespace metalmm::cpu
