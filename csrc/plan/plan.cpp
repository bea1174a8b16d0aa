#include "plan.h"

#include <algorithm>
#include <stdexcept>

#include "metal/geometry.h"
#include "names.h"
#include "passes.h"

namespace metalmm {
namespace {

using S = StrategyId;

// ---- tuning.def as values

enum class Generations { M1_M2, M3_M4, M5 };

struct Tuning {
  Generations generations;
  ChipClass chip_class;
  int64_t batched_max_m, small_max_m, large_k_steps, large_k_threadgroups, wide_n_min_n;
};

struct Split {
  StrategyId strategy;
  int64_t threadgroups_per_core, min_k_per_part;
};

constexpr Tuning kTunings[] = {
#define MM_TUNING(generations, chip_class, ...) \
  {Generations::generations, ChipClass::k##chip_class, __VA_ARGS__},
#include "tuning.def"
};

constexpr bool batches_fit() {
  for (const Tuning& t : kTunings) {
    if (t.batched_max_m > kMaxBatch) return false;
  }
  return true;
}
static_assert(batches_fit(), "tuning.def: batched_max_m is over what gemv_batched takes");

constexpr Split kSplits[] = {
#define MM_SPLIT(strategy, ...) {S::strategy, __VA_ARGS__},
#include "tuning.def"
};

struct Fused {
  Op op;
  int64_t max_m;
};

constexpr Fused kFused[] = {
#define MM_FUSED(op, max_m) {Op::op, max_m},
#include "tuning.def"
};

const Tuning& tuning_of(const Gpu& gpu) {
  const auto generations = gpu.generation <= Generation::kM2   ? Generations::M1_M2
                           : gpu.generation <= Generation::kM4 ? Generations::M3_M4
                                                               : Generations::M5;
  for (const Tuning& t : kTunings) {
    if (t.generations == generations && t.chip_class == gpu.chip_class) return t;
  }
  throw std::logic_error("tuning.def: no row for " + gpu.name);
}

const Split* split_of(StrategyId strategy) {
  for (const Split& s : kSplits) {
    if (s.strategy == strategy) return &s;
  }
  return nullptr;
}

// ---- the choice

// A step of gemv_batched reads M x a piece of x for batched_rows() pieces of W. It may read as much
// as the table allows where those are kRows.
int64_t batched_max_m(const Problem& p, const Gpu& gpu) {
  const Tuning& t = tuning_of(gpu);
  if (const auto most = measured_batched_max_m(p, gpu)) return *most;
  const int values = piece_of(p.format->codec).values, rows = batched_rows(values);
  return t.batched_max_m * rows / GemvBatched::kRows;
}

// Rows of x up to which gemm_small decodes W once.
int64_t one_small_tile(const Problem& p) { return GemmSmallTile::rows(p.dtype == DType::kF16); }

StrategyId choose_gemv(const Problem& p, const Gpu& gpu, const Tuning& t, Reason why) {
  const Piece piece = piece_of(p.format->codec);
  if (p.n > t.wide_n_min_n && piece.is_wide) {
    why.add("M = 1 and N = ", p.n, " is over ", t.wide_n_min_n,
            ": more rows per simdgroup, fewer loads of x");
    return S::gemv_wide_n;
  }
  const int64_t threadgroups = threadgroups_of(S::gemv, p);
  const int64_t each = t.large_k_threadgroups, cores = gpu.cores;
  const int64_t long_k = t.large_k_steps * GemvLargeK::kThreads * piece.values;
  const int64_t min_k = threadgroups < cores ? long_k / 2 : long_k;
  const bool is_full = threadgroups >= each * cores;
  why.add("M = 1, ", is_full ? "and " : "", "the standard grid of ", threadgroups,
          is_full ? " threadgroups has " : " threadgroups is under ", each, " for each of ", cores,
          " cores");
  if (is_full) return S::gemv;
  if (p.k < min_k) {
    why.add(", and K = ", p.k, " is under ", min_k, ", too short to share among simdgroups");
    return S::gemv;
  }
  why.add(", and K = ", p.k, " is at least ", min_k, ": simdgroups share rows and split K");
  return S::gemv_large_k;
}

bool is_exact(const Problem& p) { return p.exact_rows && p.m > 1 && p.m <= kBatchPerPass; }

// A row as it is alone: gemv_batched has the bits of gemv and of gemv_wide_n; gemv_large_k, which
// adds in another order, takes rows side by side, which read W from the cache.
StrategyId choose_exact(const Problem& p, const Gpu& gpu, const Tuning& t, Reason why) {
  Problem alone = p;
  alone.m = 1;
  const bool is_shared = choose_gemv(alone, gpu, t, why) == S::gemv_large_k;
  why.add("; M = ", p.m, " rows with the bits of that");
  return is_shared ? S::gemv_large_k : S::gemv_batched;
}

StrategyId choose_linear(const Problem& p, const Gpu& gpu, Reason why) {
  const Tuning& t = tuning_of(gpu);
  if (is_exact(p)) return choose_exact(p, gpu, t, why);
  if (p.m <= 1) return choose_gemv(p, gpu, t, why);
  const int64_t batched = batched_max_m(p, gpu);
  if (p.m <= batched) {
    why.add("M = ", p.m, " is in 2 ... ", batched, ": every weight is decoded once for up to ",
            kBatchPerPass, " rows");
    return S::gemv_batched;
  }
  const int64_t small = std::min<int64_t>(t.small_max_m, one_small_tile(p));
  if (p.m <= small) {
    why.add("M = ", p.m, " is in ", batched + 1, " ... ", small, ": matrix-unit tiles of ",
            GemmSmallTile::kN, " rows of W, in a finer grid than those of ", GemmTile::kN);
    return S::gemm_small;
  }
  why.add("M = ", p.m, " is over ", std::max(batched, small), ": matrix-unit tiles of ",
          GemmTile::kN, " rows of W by ", rows_of_x(S::gemm, p), " of x");
  return S::gemm;
}

// The kernel that multiplies, where torch's matmul does not.
StrategyId choose(const Problem& p, const Gpu& gpu, Reason why) {
  const auto only = [&](StrategyId strategy, const char* words) {
    why.add(words);
    return strategy;
  };
  switch (p.op) {
#define MM_SINGLE(op, name, strategy, why) \
  case Op::op:                             \
    return only(S::strategy, why);
#define MM_PLANNED(op, name, strategy) \
  case Op::op:                         \
    break;
#include "problems.def"
    case Op::kLinear:
      return choose_linear(p, gpu, why);
    case Op::kSwigluDown:
      return only(S::swiglu_down, "act(gate) * up is computed as x is loaded");
    case Op::kExpertTiles:
      why.add("rows by expert, ", p.experts.tile_rows, " a tile");
      return S::expert_gemm;
    case Op::kAttention:
    case Op::kCount:
      break;
  }
  throw std::logic_error("plan: no such op");
}

// The strategy, or one that does the same in less threadgroup memory.
StrategyId fitting(StrategyId first, const Problem& p, const Gpu& gpu, Reason reason) {
  const auto fits = [&](StrategyId s) {
    return threadgroup_bytes_of(s, p.dtype) <= gpu.max_threadgroup_memory;
  };
  if (fits(first)) return first;
  std::string why;
  Reason(&why).add(to_string(first), " needs ", threadgroup_bytes_of(first, p.dtype),
                   " bytes of threadgroup memory, over the ", gpu.max_threadgroup_memory,
                   " of this GPU");
  if (p.op == Op::kLinear) {
    for (StrategyId s : {S::gemm_small, S::gemm_naive}) {
      if (!fits(s)) continue;
      reason.add("; but ", why);
      return s;
    }
  }
  reject("gpu: ", why);
}

// Parts of K: as many as bring the grid to what the cores need, none shorter than the table allows.
// Forced: at least 2, if K has so many steps.
Parts choose_parts(StrategyId strategy, const Problem& p, const Gpu& gpu, bool forced,
                   Reason reason) {
  const Split* split = split_of(strategy);
  if (!split && !forced) return {1, p.k};
  const int64_t threadgroups = threadgroups_of(strategy, p);
  const int64_t wanted = split ? split->threadgroups_per_core * gpu.cores : 0;
  int64_t count = split ? std::min(ceil_div(wanted, threadgroups), p.k / split->min_k_per_part) : 0;
  const bool is_needed = count > 1;
  if (forced) count = std::max<int64_t>(count, 2);
  const Parts parts = cut(strategy, p, count);
  if (parts.count > 1) {
    reason.add("; K in ", parts.count, " parts of ", parts.k_per_part);
    if (is_needed) {
      reason.add(", for ", threadgroups, " threadgroups are under ", split->threadgroups_per_core,
                 " for each of ", gpu.cores, " cores");
    } else {
      reason.add(", as asked");
    }
  } else if (forced) {
    reason.add("; split-K as asked, in one part: K has no second step");
  }
  return parts;
}

// The parts of a row alone: a forced strategy stands for a kernel that does not cut K.
Parts exact_parts(StrategyId strategy, const Problem& p, const Gpu& gpu, bool forced,
                  Reason reason) {
  if (forced) return {1, p.k};
  Problem alone = p;
  alone.m = 1;
  const bool is_linear = p.op == Op::kLinear;
  const Reason unsaid(nullptr);
  const StrategyId first = is_linear ? choose_gemv(alone, gpu, tuning_of(gpu), unsaid) : strategy;
  return choose_parts(first, alone, gpu, false, reason);
}

// ---- what is asked for

template <class Named>
std::string join(const std::vector<Named>& all) {
  return join_names(static_cast<int>(all.size()), [&](int i) { return to_string(all[i]); });
}

bool computes(StrategyId strategy, Op op) {
  const auto able = strategies_of(op);
  return std::find(able.begin(), able.end(), strategy) != able.end();
}

void check_computes(StrategyId strategy, Op op) {
  if (computes(strategy, op)) return;
  std::vector<Op> ops;
  for (int i = 0; i < static_cast<int>(Op::kCount); ++i) {
    if (computes(strategy, static_cast<Op>(i))) ops.push_back(static_cast<Op>(i));
  }
  reject("strategy: ", to_string(strategy), " computes ", join(ops), ", not ", to_string(op),
         "; that takes ", join(strategies_of(op)));
}

StrategyId force(StrategyId strategy, const Problem& p, const Gpu& gpu) {
  if (p.has_norm && !takes_norm(strategy)) {
    reject("strategy: ", to_string(strategy), " does not normalise x");
  }
  check_fits("strategy", strategy, threadgroup_bytes_of(strategy, p.dtype), gpu);
  return strategy;
}

bool has_no_output(const Problem& p) {
  if (p.op == Op::kDot) return false;
  if (is_of_rows(p.op)) return p.m == 0 || p.k == 0;
  if (!has_weight(p.op)) return p.n == 0;
  if (p.op == Op::kEmbedding) return p.m == 0 || p.k == 0;
  if (p.op == Op::kDequantize) return p.n == 0 || p.k == 0;
  return p.m == 0 || p.n == 0;
}

}  // namespace

Plan plan(const Problem& problem, const Gpu& gpu, std::optional<StrategyId> strategy,
          std::string* words) {
  check(problem);
  if (strategy) check_computes(*strategy, problem.op);
  if (words) words->clear();
  std::string why;  // behind the name of the strategy, which is known last
  const Reason reason(words ? &why : nullptr);
  if (problem.op == Op::kRopeAppend) return plan_append(problem, gpu, Reason(words));
  if (problem.op == Op::kAttention) return plan_attention(problem, gpu, strategy, Reason(words));
  if (problem.op == Op::kRoute) return plan_route(problem, Reason(words));
  if (problem.op == Op::kCausalConv || problem.op == Op::kGatedDelta ||
      problem.op == Op::kSsmScan) {
    return plan_recurrent(problem, Reason(words));
  }
  const bool is_split_forced = strategy == S::split_reduce;
  if (is_split_forced) force(S::split_reduce, problem, gpu);
  Plan out;
  if (has_no_output(problem)) {
    Reason(words).add(kNoOutput);
    return out;
  }
  check_sizes(problem);
  StrategyId chosen = S::dense;
  if (strategy && !is_split_forced) {
    chosen = force(*strategy, problem, gpu);
    reason.add("forced");
  } else {
    const bool is_ours = strategy || is_exact(problem) || !dense_pays(problem, gpu, reason);
    if (is_ours) chosen = choose(problem, gpu, reason);
    chosen = fitting(chosen, problem, gpu, reason);
  }
  Parts parts{1, problem.k};  // one part for a norm too: every part would need the squares of all
  if (chosen == S::dense) {
    out = plan_dense(problem, gpu, reason);
  } else if (problem.has_norm) {
    if (!takes_norm(chosen)) {
      reject("norm: ", to_string(chosen), " does not normalise x; rms_norm is a pass before it");
    }
    reason.add("; norm fused: simdgroups sum the squares of x as they multiply it");
  } else if (problem.op <= Op::kSwigluDown) {
    const bool is_forced = strategy.has_value();
    parts = is_exact(problem) && !is_split_forced
                ? exact_parts(chosen, problem, gpu, is_forced, reason)
                : choose_parts(chosen, problem, gpu, is_split_forced, reason);
  }
  Reason(words).add(to_string(chosen), ": ", why);
  if (chosen == S::dense) return out;
  const bool is_split = is_split_forced || parts.count > 1;
  const int64_t rows = choose_rows(chosen, problem, gpu, is_split);
  Pass main = main_pass(chosen, problem, parts, is_split, rows);
  choose_loads(chosen, problem, gpu, main);
  if (takes_arranged(chosen, problem, gpu, is_split)) {
    out.passes.push_back(arrange_pass(chosen, problem, main));
    out.arranged_bytes = arranged_bytes(out.passes.front());
    out.main = 1;
  }
  out.passes.push_back(std::move(main));
  if (is_split) {
    const int64_t results = product(parts.count, product(problem.m, problem.n));
    out.workspace_bytes = static_cast<size_t>(product(results, sizeof(float)));
    out.passes.push_back(reduce_pass(problem, parts));
  }
  return out;
}

// A vector kernel adds to the cost of a weight, for each row of x, 2 issue cycles over the rows of
// W that share x: half a cycle at M = 1. gemv_batched stays within what the memory of a chip leaves
// it, 8 to 10 cycles, and within 128 registers, up to as many rows of x as of W (ptxas: beyond,
// q4_0 at M = 8 spills 120 bytes, q4_k at M = 4 36); a pass of rms_norm costs 2 to 3 us at any M.
bool norm_is_fused(const Problem& p, const Gpu& gpu) {
  const int64_t weights = product(product(p.n, p.k), p.op == Op::kSwigluUp ? 2 : 1);
  const int64_t most = product(gpu.norm_weights_per_core, gpu.cores);
  if (most && weights > most) return false;
  if (is_exact(p)) return true;
  const int64_t rows = batched_rows(piece_of(p.format->codec).values);
  return p.m <= std::min<int64_t>(rows, batched_max_m(p, gpu));
}

bool is_fused(Op op, int64_t m) {
  for (const Fused& f : kFused) {
    if (f.op == op) return m <= f.max_m;
  }
  return false;
}

}  // namespace metalmm
