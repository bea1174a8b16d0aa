#include <algorithm>

#include "metal/geometry.h"
#include "ops.h"
#include "ops/checks.h"
#include "ops/tensors.h"
#include "parallel.h"

namespace metalmm::cpu {
namespace {

// The bits of the shader's: the same sums, in the same order.
void turn(const float* x, float* y) {
  std::copy(x, x + kHadamardValues, y);
  for (int step = 1; step < kHadamardValues; step *= 2) {
    for (int i = 0; i < kHadamardValues; i += 2 * step) {
      for (int j = i; j < i + step; ++j) {
        const float a = y[j], b = y[j + step];
        y[j] = a + b;
        y[j + step] = a - b;
      }
    }
  }
  for (int i = 0; i < kHadamardValues; ++i) y[i] *= kHadamardScale;
}

}  // namespace

at::Tensor hadamard(const args::hadamard& a) {
  check(a);
  const at::Tensor x = a.x.to(at::kFloat).contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  const float* from = elements<float>(x);
  float* to = y.mutable_data_ptr<float>();
  parallel_for(0, x.numel() / kHadamardValues, row_grain(kHadamardValues),
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) {
                   turn(from + i * kHadamardValues, to + i * kHadamardValues);
                 }
               });
  return y.to(a.x.scalar_type());
}

}  // namespace metalmm::cpu
