#include "passes.h"

#include <algorithm>
#include <limits>

#include "metal/geometry.h"

namespace metalmm {
namespace {

using S = StrategyId;

// ---- strategies.def as values

template <Family family, class G>
constexpr StrategyInfo info(const char* name, uint32_t slots) {
  StrategyInfo out{};
  out.name = out.kernels = name;
  out.family = family;
  out.slots = slots;
  out.threads = G::kThreads;
  if constexpr (family == Family::Matmul) {
    out.n = G::kN;
    out.m = G::kM;
    out.k = G::kK;
    out.threadgroup_bytes = bound_bytes(G::threadgroup_bytes(false));
    out.threadgroup_bytes_f16 = bound_bytes(G::threadgroup_bytes(true));
    out.rounds_to_half = rounds_to_half<G>(true);
    out.on_matrix_unit = G::kOnMatrixUnit;
    if constexpr (G::kTakesBatch) {
      out.batch_of = &G::template batch_of<int64_t>;
      out.bytes_per_row = G::kBytesPerRow;
    }
  } else if constexpr (family == Family::Attention) {
    // attention.cpp has the threadgroup memory of a problem.
    out.threadgroup_bytes = out.threadgroup_bytes_f16 = bound_bytes(0);
  } else if constexpr (family == Family::Single || family == Family::Groups) {
    out.threadgroup_bytes = out.threadgroup_bytes_f16 = bound_bytes(G::kThreadgroupBytes);
  } else {
    out.values = G::kValues;
    out.threadgroup_bytes = out.threadgroup_bytes_f16 = bound_bytes(0);
  }
  return out;
}

constexpr StrategyInfo alias(StrategyInfo info, const char* name) {
  info.name = name;
  info.is_alias = true;
  return info;
}

// A row computed by torch: its passes need what the kernels of the row `passes` need.
constexpr StrategyInfo of_torch(const StrategyInfo& passes, const char* name) {
  StrategyInfo out{};
  out.name = name;
  out.kernels = passes.name;
  out.is_alias = true;
  out.family = Family::Torch;
  out.threads = passes.threads;
  out.threadgroup_bytes = passes.threadgroup_bytes;
  out.threadgroup_bytes_f16 = passes.threadgroup_bytes_f16;
  return out;
}

namespace row {
#define MM_STRATEGY(name, Fam, Geometry, slots, ...) \
  constexpr StrategyInfo name = info<Family::Fam, Geometry>(#name, slots);
#include "metal/strategies.def"
}  // namespace row

constexpr StrategyInfo kStrategies[] = {
#define MM_STRATEGY(name, ...) row::name,
#define MM_ALIAS(name, other) alias(row::other, #name),
#define MM_TORCH(name, passes) of_torch(row::passes, #name),
#include "metal/strategies.def"
};
static_assert(sizeof kStrategies / sizeof *kStrategies == kNumStrategies);

// ---- sizes

// Elements of hadamard, act_mul or a probe, ids of an embedding, rows of cos of rope, rows of W.
int64_t count_of(const Problem& p) {
  if (p.op == Op::kEmbedding) return p.m;
  if (is_of_rows(p.op)) return p.op == Op::kRope ? p.rope.angle_rows : 0;
  if (p.op == Op::kDot) return p.k;
  return p.n;
}

// Threads of a flat grid.
int64_t items_of(StrategyId strategy, const Problem& p) {
  const int64_t values = info_of(strategy).values;
  if (strategy == S::split_reduce) return ceil_div(product(p.m, p.n), values);
  if (strategy == S::rope_tables) return product(p.m, p.k);
  if (strategy == S::rope) return product(product(p.m, heads_of(p.rope)), kSimdWidth);
  if (!has_weight(p.op)) return ceil_div(count_of(p), values);
  return product(p.op == Op::kEmbedding ? p.m : p.n, ceil_div(p.k, values));
}

// rows: of x a threadgroup.
std::array<uint32_t, 3> grid_of(StrategyId strategy, const Problem& p, int64_t rows,
                                int64_t parts) {
  const StrategyInfo& s = info_of(strategy);
  if (s.family == Family::Single) return {1, 1, 1};
  if (s.family == Family::Groups) return {u32(p.m, "grid"), 1, 1};
  if (s.family != Family::Matmul) return flat_grid(items_of(strategy, p), s.threads);
  return {u32(ceil_div(p.m, rows), "grid"), u32(ceil_div(p.n, s.n), "grid"), u32(parts, "grid")};
}

// ---- constants and arguments

// The bits of what joins the result.
uint32_t addends_of(const Problem& p) {
  const uint32_t joins = p.bias_multiplies ? kEpilogueFactors : kEpilogueBias;
  return (p.has_bias ? joins : 0u) | (p.softcap != 0 ? kEpilogueSoftcap : 0u) |
         (p.has_c && p.beta != 0 ? kEpilogueC : 0u) |
         (p.alpha != 1 && p.op != Op::kSwigluUp ? kEpilogueAlpha : 0u);
}

// The bits of functions of x, or of a gate.
uint32_t functions_of(const Problem& p) {
  uint32_t out = p.has_norm ? kEpilogueNorm : 0u;
  if (p.has_norm_weight) {
    out |= kEpilogueNormWeight | (p.offset != 0 ? kEpilogueNormOffset : 0u);
  }
  if (p.has_gate) out |= kNormGate;
  if (p.rounded) out |= kActMulRounded;
  return out | expert_bits(p) | kEpilogueActivation * static_cast<uint32_t>(p.activation);
}

bool has_two_weights(Op op) { return op == Op::kSwigluUp || op == Op::kExpertUp; }

KernelArgs args_of(const Problem& p, const Parts& parts) {
  KernelArgs a{};
  const bool is_linear = p.op <= Op::kExpertTiles;
  const int64_t heads = p.op == Op::kRope ? heads_of(p.rope) : 1, x2_heads = p.rope.kv_heads;
  a.x_stride = or_packed(p.x_stride, product(heads, p.k));
  a.x2_stride = or_packed(p.x2_stride, p.op == Op::kRope ? product(x2_heads, p.k) : a.x_stride);
  a.y_stride = or_packed(p.y_stride, is_linear ? p.n : p.k);
  a.m = static_cast<uint32_t>(p.m);
  a.n = static_cast<uint32_t>(p.n);
  a.k = static_cast<uint32_t>(p.k);
  a.k_per_part = u32(parts.k_per_part, "k");
  a.parts = u32(parts.count, "parts");
  a.count = u32(count_of(p), "count");
  a.alpha = p.alpha;
  a.beta = p.beta;
  a.softcap = p.softcap;
  a.eps = p.eps;
  a.offset = p.offset;
  if (p.op == Op::kRmsNorm) a.heads = u32(p.norm_rows, "norm_rows");
  if (p.op == Op::kRope) {
    a.heads = u32(p.rope.heads, "heads");
    a.kv_heads = u32(p.rope.kv_heads, "kv_heads");
    a.rotated = u32(p.rope.rotated, "rotated");
    a.positions = u32(p.rope.positions, "positions");
  }
  if (!has_weight(p.op)) return a;
  const int64_t row_bytes = p.format->row_bytes(p.k);
  a.w_stride = or_packed(p.w_stride, row_bytes);
  if (has_two_weights(p.op)) a.w2_stride = or_packed(p.w2_stride, row_bytes);
  if (is_of_experts(p.op)) set_experts(p, a);
  return a;
}

// Whether rows start at multiples of `bytes`: the first does, and the stride is one or there is no
// second row.
bool rows_aligned(int64_t first, int64_t rows, int64_t stride_bytes, int64_t bytes) {
  return first % bytes == 0 && (rows <= 1 || stride_bytes % bytes == 0);
}

uint32_t bounds_of(StrategyId strategy, const Problem& p, int64_t rows_of_x, const KernelArgs& a) {
  const StrategyInfo& s = info_of(strategy);
  uint32_t out = 0;
  if (s.family == Family::Matmul) {
    if (p.n % s.n) out |= kBoundsN;
    // The matrix units' tiles ask for it always: a length of a prompt would be a pipeline more.
    const bool is_any = s.on_matrix_unit && p.op != Op::kExpertTiles;
    if (is_any || p.m % rows_of_x) out |= kBoundsM;
    // A tile loads its first step before it knows of another: of no K there is none to load.
    if (p.k % s.k || p.k == 0) out |= kBoundsK;
    const int64_t value_bytes = dtype_bytes(p.dtype);
    // A row of y of kExpertDown sums that many rows of x.
    const int64_t rows = p.op == Op::kExpertDown ? product(p.m, p.experts.choices) : p.m;
    if (rows_aligned(p.x_alignment, rows, a.x_stride * value_bytes, 16)) {
      out |= kBoundsAlignedX;
    }
  } else if (s.family == Family::Rows && p.k % s.values) {
    out |= kBoundsK;
  } else if (s.family == Family::Groups) {
    const int64_t value_bytes = dtype_bytes(p.dtype);
    if (p.k % (16 / value_bytes)) out |= kBoundsK;
    const auto aligned = [&](int64_t stride) {
      return rows_aligned(p.x_alignment, p.m, stride * value_bytes, 16);
    };
    if (aligned(a.x_stride) && aligned(a.x2_stride) && aligned(a.y_stride)) out |= kBoundsAlignedX;
  }
  return has_weight(p.op) ? out | bounds_of_weights(p, a) : out;
}

Pass make_pass(StrategyId strategy, const Problem& p, const Parts& parts, int64_t rows) {
  const StrategyInfo& s = info_of(strategy);
  const Codec codec = has_weight(p.op) ? p.format->codec : Codec::kCount;
  const auto grid = grid_of(strategy, p, rows, parts.count);
  Pass out = bare_pass(strategy, codec, p.dtype, args_of(p, parts));
  out.grid = grid;
  if (s.family != Family::Flat && s.family != Family::Single) {
    out.constants[kConstantK] = out.args.k;
    out.constants[kConstantBounds] = bounds_of(strategy, p, rows, out.args);
  }
  if (s.family == Family::Matmul || s.family == Family::Rows) {
    if (p.format->layout == Layout::kAffine) {
      out.constants[kConstantGroup] = static_cast<uint32_t>(p.format->block_values);
      out.constants[kConstantScaleType] =
          static_cast<uint32_t>(scale_type_of(p.format->scale_type));
    }
  }
  if (s.batch_of) {
    const auto batch = static_cast<uint32_t>(rows);
    out.constants[kConstantBatch] = batch;
    if (s.bytes_per_row) out.threadgroup_bytes = bound_bytes(batch * s.bytes_per_row);
  }
  return out;
}

}  // namespace

uint32_t u32(int64_t v, const char* what) {
  if (v < 0 || v > std::numeric_limits<uint32_t>::max()) {
    reject(what, ": ", v, " does not fit 32 bits");
  }
  return static_cast<uint32_t>(v);
}

std::array<uint32_t, 3> flat_grid(int64_t threads, int of_group) {
  const int64_t threadgroups = ceil_div(threads, of_group);
  u32(product(threadgroups, of_group), "threads");
  return {u32(threadgroups, "grid"), 1, 1};
}

void check_fits(const char* argument, StrategyId strategy, uint32_t bytes, const Gpu& gpu) {
  if (bytes <= gpu.max_threadgroup_memory) return;
  reject(argument, ": ", to_string(strategy), " needs ", bytes,
         " bytes of threadgroup memory; this GPU has ", gpu.max_threadgroup_memory);
}

Pass bare_pass(StrategyId strategy, Codec codec, DType dtype, const KernelArgs& args) {
  const StrategyInfo& s = info_of(strategy);
  Pass out;
  out.kernel = kernel_name(strategy, codec, dtype);
  out.threads = {static_cast<uint32_t>(s.threads), 1, 1};
  out.threadgroup_bytes = threadgroup_bytes_of(strategy, dtype);
  out.slots = s.slots;
  out.args = args;
  return out;
}

uint32_t bounds_of_weights(const Problem& p, const KernelArgs& a) {
  const int64_t row = p.format->row_bytes(p.k);
  const auto begin_at = [&](int64_t bytes) {
    return rows_aligned(p.w_alignment, p.n, a.w_stride, bytes) &&
           rows_aligned(p.w_alignment, p.n, a.w2_stride, bytes);
  };
  uint32_t out = 0;
  const bool is_packed = a.w_stride == row && (!has_two_weights(p.op) || a.w2_stride == row);
  if (is_packed || p.n <= 1) out |= kBoundsPackedRows;
  if (p.format->layout == Layout::kDense && begin_at(16)) out |= kBoundsAlignedWeight;
  if (p.format->layout == Layout::kBlock && p.format->alignment == 2) {
    if (row % 4 == 0 && begin_at(4)) out |= kBoundsWordBlocks;
    if (row % 8 == 0 && begin_at(8)) out |= kBoundsLongBlocks;
  }
  return out;
}

void choose_loads(StrategyId strategy, const Problem& p, const Gpu& gpu, Pass& pass) {
  const StrategyInfo& s = info_of(strategy);
  const bool multiplies = s.family == Family::Matmul && !s.on_matrix_unit;
  uint32_t& bounds = pass.constants[kConstantBounds];
  if ((multiplies || strategy == StrategyId::attention_split) && !gpu.reads_long_blocks) {
    bounds &= ~static_cast<uint32_t>(kBoundsLongBlocks);
  }
  if (multiplies && gpu.keeps_subnormals && p.format->layout != Layout::kDense) {
    bounds |= kBoundsSubnormals;
  }
}

const StrategyInfo& info_of(StrategyId strategy) { return kStrategies[static_cast<int>(strategy)]; }

int64_t heads_of(const RopeSizes& r) { return r.heads + product(r.kv_heads, 2); }

uint32_t rope_bits(const Problem& p) {
  const RopeSizes& r = p.rope;
  return (r.q_norm ? kRopeNormQ : 0u) | (r.k_norm ? kRopeNormK : 0u) |
         (r.whole_norms ? kRopeWholeNorms : 0u) | (r.v_norm ? kRopeNormV : 0u) |
         (p.offset != 0 ? kRopeOffset : 0u) | (r.interleaved ? kRopeInterleaved : 0u) |
         (r.v_apart ? kRopeApart : 0u) | (r.float_angles ? kRopeFloatTables : 0u) |
         (p.append.half_keys ? kRopeHalfKeys : 0u) | (p.append.pages ? kRopePages : 0u) |
         (p.append.rotated_keys ? kRopeRotateKeys : 0u) |
         (p.append.rotated_values ? kRopeRotateValues : 0u);
}

int64_t product(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_mul_overflow(a, b, &out)) {
    reject("shape: ", a, " x ", b, " does not fit 64 bits");
  }
  return out;
}

void check_sizes(const Problem& p) {
  u32(p.m, "m");
  u32(p.n, p.op == Op::kActMul ? "elements of gate" : "n");  // M N of swiglu's caller
  u32(p.k, "k");
}

int64_t rows_of_x(StrategyId strategy, const Problem& p) {
  const StrategyInfo& s = info_of(strategy);
  if (!s.batch_of) return s.m;
  if (p.op == Op::kExpertTiles) return p.experts.tile_rows;
  const int64_t rows = s.batch_of(p.m, p.dtype == DType::kF16, piece_of(p.format->codec).values);
  // Each size has a pipeline: one matrix of the unit, or an even number of them.
  const int64_t two = 2 * kFragment;
  return s.on_matrix_unit && rows > kFragment ? product(ceil_div(rows, two), two) : rows;
}

int64_t threadgroups_of(StrategyId strategy, const Problem& p) {
  return product(ceil_div(p.m, rows_of_x(strategy, p)), ceil_div(p.n, info_of(strategy).n));
}

uint32_t threadgroup_bytes_of(StrategyId strategy, DType dtype) {
  const StrategyInfo& s = info_of(strategy);
  return static_cast<uint32_t>(dtype == DType::kF16 ? s.threadgroup_bytes_f16
                                                    : s.threadgroup_bytes);
}

Parts cut(StrategyId strategy, const Problem& p, int64_t most) {
  const int64_t step = info_of(strategy).k;
  const int64_t block = p.format->block_values;
  // step and block are powers of two: the larger is a multiple of the other.
  const int64_t multiple = std::max(step, block);
  const int64_t per_part = ceil_div(ceil_div(p.k, std::max<int64_t>(most, 1)), multiple) * multiple;
  if (per_part >= p.k) return {1, p.k};
  return {ceil_div(p.k, per_part), per_part};
}

Pass main_pass(StrategyId strategy, const Problem& p, const Parts& parts, bool is_split,
               int64_t rows) {
  Pass out = make_pass(strategy, p, parts, rows);
  uint32_t& epilogue = out.constants[kConstantEpilogue];
  if (strategy == S::rope) {
    epilogue = rope_bits(p);
    out.constants[kConstantK] = out.args.k;
    return out;
  }
  if (strategy == S::rope_tables) {
    const TableSizes& t = p.tables;
    epilogue = (t.twice ? kTablesTwice : 0u) | (t.interleaved ? kTablesInterleaved : 0u) |
               (t.axes ? kTablesAxes : 0u);
    out.args.n = u32(product(p.k, t.twice ? 2 : 1), "values of a row");
    out.args.kv_heads = u32(t.rows, "rows");
    out.constants[kConstantK] = out.args.k;
    return out;
  }
  if (strategy == S::embedding) {
    if (p.has_scale) {
      epilogue =
          kRowScale | (p.float_scale ? kRowFloatScale : 0u) | (p.row_scales ? kRowScales : 0u);
    }
    return out;
  }
  epilogue = functions_of(p);
  if (is_split || (p.y_f32 && p.dtype != DType::kF32)) {
    epilogue |= kEpiloguePartial;
    out.args.y_stride = p.n;  // rows of the workspace
  } else {
    epilogue |= addends_of(p);
  }
  return out;
}

Pass reduce_pass(Problem p, const Parts& parts) {
  if (p.y_f32) p.dtype = DType::kF32;
  Pass out = make_pass(S::split_reduce, p, parts, 0);
  out.constants[kConstantEpilogue] = addends_of(p);
  return out;
}

}  // namespace metalmm
