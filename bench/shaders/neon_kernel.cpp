// A NEON kernel for one row of x, called as often as asked:
//   kernel FORMAT exact|int8|int16 K CALLS
// W and x are zeros: no instruction depends on what they hold.
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/int8/kernels.h"

namespace metalmm::cpu {
namespace neon {
extern const IsaKernels kKernels;
}
namespace neon_dot {
extern const int8::Kernels kInt8Kernels;
}
}  // namespace metalmm::cpu

using namespace metalmm;
using namespace metalmm::cpu;

int main(int, char** argv) {
  const Format& f = format_by_name(argv[1]);
  const std::string products = argv[2];
  const int64_t k = std::atoll(argv[3]), calls = std::atoll(argv[4]);
  std::vector<uint8_t> packed(MM_ROWS * f.row_bytes(k));
  const Weight w = make_weight(packed.data(), f.row_bytes(k), f, k);
  std::vector<float> x(2 * k), y(MM_ROWS);
  if (products == "exact") {
    const CodecKernels& codec = neon::kKernels.of(f.codec);
    const DotKernel dot = codec.steps.values > 0 ? codec.steps.dot[0] : codec.dot[0];
    for (int64_t i = 0; i < calls; ++i) dot({w, 0, MM_ROWS, x.data(), y.data(), MM_ROWS});
  } else {
    const int parts = products == "int8" ? 1 : 2;
    std::vector<uint8_t> memory(int8::RoundedRow::bytes(k, parts));
    const auto row = int8::RoundedRow::in(memory.data(), k, parts);
    const auto& codec = neon_dot::kInt8Kernels.codec[static_cast<int>(f.codec)];
    for (int64_t i = 0; i < calls; ++i)
      codec.gemv[parts - 1][0]({w, 0, MM_ROWS, &row, y.data(), MM_ROWS});
  }
  return 0;
}
