// The ops on experts: rows of x, each multiplied with W of the experts that ids choose for it.
#include <algorithm>

#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

// Choices of an expert, on the average, from which a tile of 8 rows takes less time than a row
// each: by the times of gemm at 8 rows and of gemv, 46 and 28 us (H200, q4_0, 14336 x 4096),
// from 1.2 on, if all experts are chosen; sorting and gathering rows are a dozen small passes
// beside it.
constexpr int64_t kTiledChoices = 2;

}  // namespace

bool experts_are_tiled(int64_t choices, int64_t experts) {
  return choices >= product(kTiledChoices, std::max<int64_t>(experts, 1));
}

// A quarter above the average: of an expert that more rows chose the last tile is the second one,
// which decodes W again. (8 rows more cost a tile 13 us of the 72 that 24 take: decoding is 33.)
int64_t expert_tile_rows(int64_t choices, int64_t experts) {
  const int64_t wanted = ceil_div(product(choices, 5), product(std::max<int64_t>(experts, 1), 4));
  const int64_t two = 2 * kFragment;  // each size has a pipeline
  const int64_t rows = wanted <= kFragment ? kFragment : ceil_div(wanted, two) * two;
  return std::clamp<int64_t>(rows, kFragment, GemmTile::kM);
}

void check_experts(const Problem& p) {
  const ExpertSizes& e = p.experts;
  if (e.experts < 1 && p.m > 0) reject("experts: ", e.experts, "; at least 1");
  if (e.choices < 1 || e.sharing < 1) {
    reject("choices: ", e.choices, ", ", e.sharing, " of a row of x; at least 1");
  }
  const int64_t rows = e.tile_rows;
  if (p.op == Op::kExpertTiles &&
      (rows < kFragment || rows > GemmTile::kM || rows % kFragment || p.m % rows)) {
    reject("tile_rows: ", rows, "; a multiple of ", kFragment, " up to ", GemmTile::kM,
           " that divides the ", p.m, " rows of x");
  }
  for (int64_t stride : {e.stride, e.stride2}) {
    if (stride < kPacked || (stride != kPacked && stride % p.format->alignment)) {
      reject("stride of experts: ", stride, "; rows of ", p.format->name, " begin at multiples of ",
             p.format->alignment, " bytes");
    }
  }
}

void set_experts(const Problem& p, KernelArgs& a) {
  const ExpertSizes& e = p.experts;
  const bool is_gated = p.op == Op::kExpertUp;
  a.head_stride = or_packed(e.stride, product(a.w_stride, p.n));
  a.heads = u32(e.choices, "choices");
  a.kv_heads = u32(e.experts, "experts");
  a.positions = u32(e.sharing, "choices");
  a.window = u32(product(p.n, is_gated ? 2 : 1), "n");
  a.count = is_gated && e.alternates ? 2 : 1;
  if (is_gated) {
    a.sequence_stride = or_packed(e.stride2, product(a.w2_stride, p.n));
    a.rotated = e.alternates ? 1 : static_cast<uint32_t>(p.n);
    a.alpha = e.alpha;
    a.softcap = e.limit;
  }
}

uint32_t expert_bits(const Problem& p) {
  if (!is_of_experts(p.op)) return 0;
  const ExpertSizes& e = p.experts;
  return (e.limit > 0 ? kExpertLimit : 0u) | (e.is_oai ? kExpertOai : 0u) |
         (e.float_scores ? kExpertFloatScores : 0u);
}

}  // namespace metalmm
