// The types of values: of activations and results, and of what an affine format scales by. No
// torch.
#pragma once

#include <cstdint>

namespace metalmm {

enum class DType : int {
#define MM_DTYPE(name, Enumerator, ...) Enumerator,
#include "dtypes.def"
  kCount
};
constexpr int kNumDTypes = static_cast<int>(DType::kCount);

constexpr int64_t dtype_bytes(DType d) {
  constexpr int64_t kBytes[] = {
#define MM_DTYPE(name, Enumerator, bytes, ...) bytes,
#include "dtypes.def"
  };
  return kBytes[static_cast<int>(d)];
}

// The name in formats and kernels.
constexpr const char* to_string(DType d) {
  constexpr const char* kNames[] = {
#define MM_DTYPE(name, ...) #name,
#include "dtypes.def"
  };
  return kNames[static_cast<int>(d)];
}

}  // namespace metalmm
