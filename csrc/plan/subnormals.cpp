#include "subnormals.h"

#include <exception>
#include <numeric>

#include "plan.h"

namespace metalmm {

bool keeps_subnormals(Gpu gpu, const std::function<void(const BoundPlans&)>& run) {
  gpu.keeps_subnormals = true;
  Problem p;
  p.k = 32;
  p.format = &format_by_name("q4_0");
  p.dtype = DType::kF32;
  // x = 1 ... 32; a scale of 1, and byte j has the codes j and 15 - j, less 8.
  float x[32], y = 0;
  std::iota(x, x + 32, 1.0f);
  uint8_t w[18] = {0x00, 0x3C};
  for (int j = 0; j < 16; ++j) w[2 + j] = static_cast<uint8_t>(j | (15 - j) << 4);
  Buffers operands{};
  operands[kSlotX] = {x, 0, sizeof x};
  operands[kSlotWeight] = {w, 0, sizeof w};
  operands[kSlotY] = {&y, 0, sizeof y};
  try {
    run({{plan(p, gpu, StrategyId::gemv), operands}});
  } catch (const std::exception&) {
    return false;
  }
  return y == kKeptProduct;
}

}  // namespace metalmm
