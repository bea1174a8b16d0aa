// Few rows of x: how many gemv_batched takes where that was measured, and the pass that puts them
// in the order of gemm_small's lanes (metal/tile/arranged.h).
#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

struct Batched {
  Accelerator accelerator;
  DType dtype;
  Codec codec;
  int64_t max_m;
};

constexpr Batched kBatched[] = {
#define MM_BATCHED(accelerator, dtype, Struct, max_m) \
  {Accelerator::accelerator, DType::dtype, Codec::Struct, max_m},
#include "plan/tuning.def"
};

}  // namespace

std::optional<int64_t> measured_batched_max_m(const Problem& p, const Gpu& gpu) {
  for (const Batched& b : kBatched) {
    if (b.accelerator == gpu.accelerator && b.dtype == p.dtype && b.codec == p.format->codec) {
      return b.max_m;
    }
  }
  return std::nullopt;
}

bool takes_arranged(StrategyId strategy, const Pass& main) {
  return info_of(strategy).slots == kBindArranged && main.args.k > 0 &&
         main.constants[kConstantBatch] > kFragment;
}

Pass arrange_pass(const Problem& p, const Pass& main) {
  const StrategyInfo& s = info_of(StrategyId::arrange_x);
  const int64_t values = product(ceil_div(p.k, GemmSmallTile::kK), GemmSmallTile::kK);
  const int64_t rows = product(main.grid[0], main.constants[kConstantBatch]);
  Pass out = bare_pass(StrategyId::arrange_x, Codec::kCount, p.dtype, main.args);
  out.args.count = u32(product(rows, values) / s.values, "x");
  out.grid = flat_grid(out.args.count, s.threads);
  for (const int constant : {kConstantK, kConstantBatch}) {
    out.constants[constant] = main.constants[constant];
  }
  out.constants[kConstantBounds] = main.constants[kConstantBounds] & (kBoundsK | kBoundsAlignedX);
  return out;
}

size_t arranged_bytes(const Problem& p, const Pass& arrange) {
  const int64_t values = info_of(StrategyId::arrange_x).values;
  return static_cast<size_t>(product(product(arrange.args.count, values), dtype_bytes(p.dtype)));
}

}  // namespace metalmm
