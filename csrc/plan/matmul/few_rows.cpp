// Few rows of x: how many gemv_batched takes where that was measured, and in a pass; the pass that
// puts them in the order of the lanes of gemm_small or of gemv_batched (metal/kernels/arrange_x.h).
#include <algorithm>

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

// Products of a row of W and a row of x for each core from which gemv_batched of floats wins by x
// in the order of its lanes more than the pass takes, 2.5 us. H200, K = 4096, 14336 rows of W (217
// products a core at M = 2), us saved at M = 2, 4, 8, that pass included: q4_0 6.8, 15.8, 34.6;
// q8_0 -0.2, 11.9, 17.9; q4_k 7.2, 11.2, 25.8; q6_k -2.2, 4.3, 18.9; affine4 23.4, 42.2, 84.6. Half
// of them where a load of all lanes touches 32 lines, pieces of 32 values in a row. 2048 rows (78
// to 124), as x lies and arranged, at M = 5, 6, 8: affine4 18.8, 18.5, 23.4 and 9.6, 9.8, 11.2; but
// q4_k 12.9, 12.8, 15.5 and 15.3, 11.9, 15.9, q6_k 12.3, 12.2, 15.2 and 16.4, 14.7, 15.3.
constexpr int64_t kArrangedProducts = 128;

int64_t arranged_products(const Piece& piece) {
  const bool is_far = piece.values == 32 && piece.weave == piece.values;
  return is_far ? kArrangedProducts / 2 : kArrangedProducts;
}

}  // namespace

std::optional<int64_t> measured_batched_max_m(const Problem& p, const Gpu& gpu) {
  for (const Batched& b : kBatched) {
    if (b.accelerator == gpu.accelerator && b.dtype == p.dtype && b.codec == p.format->codec) {
      return b.max_m;
    }
  }
  return std::nullopt;
}

bool takes_arranged(StrategyId strategy, const Problem& p, const Gpu& gpu, bool is_split) {
  if (p.k == 0) return false;
  if (strategy == StrategyId::gemm_small) return rows_of_x(strategy, p) > kFragment;
  // With a norm lanes would read its weight as they read x; a part may begin within a step.
  const bool is_whole = !p.has_norm && !is_split;
  return strategy == StrategyId::gemv_batched && p.dtype == DType::kF32 && is_whole &&
         gpu.accelerator == Accelerator::kTensorCores && p.format->layout != Layout::kDense &&
         product(p.m, p.n) >= arranged_products(piece_of(p.format->codec)) * gpu.cores;
}

// On an NVIDIA GPU lines of L1 bound gemv_batched where lanes read x 64 bytes or more apart: passes
// of kKeptRows, whose x serves twice as many rows of W, read and decode W more often and take less
// time. H200, 14336 x 4096, us at M = 4 and 8, passes of 4 and of 2: affine4 40.9, 73.8 and 31.8,
// 57.6; x f32 126, 247 and 73.8, 141, q4_k 74.3, 139 and 48.8, 89.9. Not so q6_k, f16: 38.7
// and 45.3. Arranged: affine4 32.0, 56.9 and 29.0, 52.6, q4_k no difference, q6_k 39.0 and 46.1.
int64_t choose_rows(StrategyId strategy, const Problem& p, const Gpu& gpu, bool is_split) {
  const int64_t most = rows_of_x(strategy, p);
  const bool wants_fewer =
      strategy == StrategyId::gemv_batched && gpu.accelerator == Accelerator::kTensorCores &&
      piece_of(p.format->codec).values > 16 &&
      (p.format->layout == Layout::kAffine ||
       (p.dtype == DType::kF32 && !takes_arranged(strategy, p, gpu, is_split)));
  return wants_fewer ? std::min<int64_t>(most, kKeptRows) : most;
}

Pass arrange_pass(StrategyId strategy, const Problem& p, Pass& main) {
  const StrategyInfo& s = info_of(StrategyId::arrange_x);
  const bool is_vector = strategy == StrategyId::gemv_batched;
  const Piece piece = piece_of(p.format->codec);
  const int64_t step = is_vector ? kSimdWidth * piece.values : GemmSmallTile::kK;
  const int64_t values = product(ceil_div(p.k, step), step);
  const int64_t rows = is_vector ? p.m : product(main.grid[0], main.constants[kConstantBatch]);
  Pass out = bare_pass(StrategyId::arrange_x, Codec::kCount, p.dtype, main.args);
  out.args.count = u32(product(product(rows, values), dtype_bytes(p.dtype)) / s.values, "x");
  out.grid = flat_grid(out.args.count, s.threads);
  for (const int constant : {kConstantK, kConstantBatch}) {
    out.constants[constant] = main.constants[constant];
  }
  out.constants[kConstantBounds] = main.constants[kConstantBounds] & (kBoundsK | kBoundsAlignedX);
  if (is_vector) {
    out.args.n = static_cast<uint32_t>(piece.values);
    out.args.heads = static_cast<uint32_t>(piece.weave / piece.values);
    if (p.k % step) out.constants[kConstantBounds] |= kBoundsK;
    main.args.x_stride = values;
    main.constants[kConstantBounds] |= kBoundsArrangedX | kBoundsAlignedX;
  }
  return out;
}

size_t arranged_bytes(const Pass& arrange) {
  return static_cast<size_t>(product(arrange.args.count, info_of(StrategyId::arrange_x).values));
}

}  // namespace metalmm
