#include "checks.h"

#include <stdexcept>
#include <string>

namespace metalmm {
namespace {

bool is_activation_dtype(at::ScalarType t) {
  return t == at::kFloat || t == at::kHalf || t == at::kBFloat16;
}

std::optional<at::ScalarType> dense_dtype(const Format& f) {
  if (f.codec == Codec::F32) return at::kFloat;
  if (f.codec == Codec::F16) return at::kHalf;
  if (f.codec == Codec::BF16) return at::kBFloat16;
  return std::nullopt;
}

void check_k(const char* name, const Format& f, int64_t k) {
  TORCH_CHECK_VALUE(k >= 0 && k % f.block_values == 0, name, ": K = ", k,
                    " is not a multiple of the block of ", f.name, ", ", f.block_values, " values");
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.device() == x.device(), name, ": is on ", t.device(), ", the activations on ",
                    x.device(), "; all tensors of a call must be on one device");
}

}  // namespace

const Format& check_format(std::string_view name) {
  try {
    return format_by_name(name);
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

int64_t check_activations(const char* name, const at::Tensor& x) {
  TORCH_CHECK_VALUE(is_activation_dtype(x.scalar_type()), name, ": dtype ", x.scalar_type(),
                    "; allowed: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(x.dim() >= 1, name, ": must have at least one dimension, [..., K]");
  return x.size(-1);
}

at::Tensor check_weight(const char* name, const at::Tensor& weight, const Format& format, int64_t k,
                        const at::Tensor& x) {
  check_k(name, format, k);
  check_device(name, weight, x);
  TORCH_CHECK_VALUE(weight.dim() == 2, name, ": shape ", weight.sizes(),
                    "; must be [N, row_bytes]");
  if (weight.scalar_type() != at::kByte && dense_dtype(format) == weight.scalar_type()) {
    TORCH_CHECK_VALUE(weight.size(1) == k, name, ": shape ", weight.sizes(), ", but K = ", k);
    return weight.contiguous().view(at::kByte);
  }
  TORCH_CHECK_VALUE(weight.scalar_type() == at::kByte, name, ": dtype ", weight.scalar_type(),
                    "; allowed: uint8 rows of ", format.name);
  TORCH_CHECK_VALUE(weight.size(1) == format.row_bytes(k), name, ": shape ", weight.sizes(),
                    "; a row of ", k, " values in ", format.name, " has ", format.row_bytes(k),
                    " bytes");
  return weight.stride(1) == 1 || weight.numel() == 0 ? weight : weight.contiguous();
}

void check_addend(const char* name, const std::optional<at::Tensor>& t, at::IntArrayRef shape,
                  const at::Tensor& x) {
  if (!t.has_value()) return;
  check_device(name, *t, x);
  TORCH_CHECK_VALUE(is_activation_dtype(t->scalar_type()), name, ": dtype ", t->scalar_type(),
                    "; allowed: float32, float16, bfloat16");
  TORCH_CHECK_VALUE(t->sizes() == shape, name, ": shape ", t->sizes(), "; must be ", shape);
}

int64_t resolve_in_features(const at::Tensor& weight, const Format& format,
                            std::optional<int64_t> in_features) {
  if (in_features.has_value()) return *in_features;
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sizes(),
                    "; must be [N, row_bytes]");
  const int64_t row = weight.size(1);
  if (weight.scalar_type() != at::kByte && format.layout == Layout::kDense) return row;
  const int64_t k = row / format.block_bytes * format.block_values;
  TORCH_CHECK_VALUE(format.row_bytes(k) == row, "weight: rows of ", row,
                    " bytes are no whole number of ", format.name, " blocks");
  const int64_t smaller = k - format.block_values;
  TORCH_CHECK_VALUE(smaller < 0 || format.row_bytes(smaller) != row, "in_features: rows of ", row,
                    " bytes hold ", smaller, " or ", k, " values of ", format.name, "; say which");
  return k;
}

at::ScalarType check_dtype(std::optional<at::ScalarType> dtype) {
  const at::ScalarType t = dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(is_activation_dtype(t), "dtype: ", t, "; allowed: float32, float16, bfloat16");
  return t;
}

}  // namespace metalmm
