// torch's names of the dtypes that plan() knows.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "plan/plan.h"

namespace metalmm {

// Nothing: activations cannot be that.
inline std::optional<DType> find_dtype(at::ScalarType type) {
#define MM_DTYPE(name, Enumerator, bytes, Scalar, torch_name) \
  if (type == at::ScalarType::Scalar) return DType::Enumerator;
#include "plan/dtypes.def"
  return std::nullopt;
}

inline at::ScalarType torch_dtype(DType type) {
  constexpr at::ScalarType kTypes[] = {
#define MM_DTYPE(name, Enumerator, bytes, Scalar, torch_name) at::ScalarType::Scalar,
#include "plan/dtypes.def"
  };
  return kTypes[static_cast<int>(type)];
}

inline constexpr const char* kTorchDTypes[] = {
#define MM_DTYPE(name, Enumerator, bytes, Scalar, torch_name) #torch_name,
#include "plan/dtypes.def"
};

}  // namespace metalmm
