// The passes of attention: parts of the context, and their join.
#include <algorithm>

#include "metal/geometry.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

using S = StrategyId;

bool is_alone(const Problem& p) { return p.exact_rows && p.attention.queries > 1; }

// Rows of q of a head of keys, of a query where each is alone.
int64_t rows_of_head(const Problem& p) {
  const AttentionSizes& a = p.attention;
  return product(a.heads / a.kv_heads, is_alone(p) ? 1 : a.queries);
}

// Queries up to which the context is split: beyond, rows of q alone fill a GPU.
constexpr int64_t kSplitQueries = 16;

int64_t parts_of(const Problem& p) {
  if (p.attention.queries > kSplitQueries) return 1;
  return std::clamp<int64_t>(ceil_div(p.n, kMinPartSlots), 1, kMaxParts);
}

// A single causal query sees every slot.
uint32_t bits_of(const Problem& p) {
  const AttentionSizes& a = p.attention;
  const uint32_t several = is_alone(p) ? kAttentionAlone : kAttentionCausal;
  return (a.causal && a.queries > 1 ? several : 0u) | (a.window ? kAttentionWindow : 0u) |
         (a.softcap != 0 ? kAttentionSoftcap : 0u) | (a.bool_mask ? kAttentionBoolMask : 0u) |
         (a.float_mask ? kAttentionFloatMask : 0u) | (a.sinks ? kAttentionSinks : 0u) |
         (a.sinks && a.float_sinks ? kAttentionFloatSinks : 0u) |
         (a.half_keys ? kAttentionHalfKeys : 0u) | (a.pages ? kAttentionPages : 0u);
}

// The format of keys.
const Format& keys_of(const Problem& p) {
  static const Format& half = format_by_name("f16");
  return p.attention.half_keys ? half : *p.format;
}

KernelArgs args_of(const Problem& p, int64_t parts) {
  const AttentionSizes& a = p.attention;
  KernelArgs out{};
  out.w_stride = or_packed(p.w_stride, keys_of(p).row_bytes(p.k));
  out.w2_stride = or_packed(p.w2_stride, p.format->row_bytes(p.k));
  out.head_stride = a.head_stride;
  out.sequence_stride = a.sequence_stride;
  out.head2_stride = a.head2_stride;
  out.sequence2_stride = a.sequence2_stride;
  out.x2_stride = a.mask_stride;
  out.x2_head_stride = a.mask_head_stride;
  out.x2_sequence_stride = a.mask_sequence_stride;
  out.m = u32(product(product(a.batch, a.heads), a.queries), "q");
  out.n = u32(p.n, "n");
  out.k = u32(p.k, "k");
  out.parts = u32(parts, "parts");
  out.count = a.filled ? 1 : 0;
  out.k_per_part = u32(a.pages, "pages");
  out.heads = u32(a.heads, "heads");
  out.kv_heads = u32(a.kv_heads, "kv_heads");
  out.positions = u32(a.queries, "queries");
  out.window = u32(std::min(a.window, p.n), "window");  // over all slots it hides none
  out.alpha = a.scale;
  out.softcap = a.softcap;
  return out;
}

// q is dense: its rows, of multiples of kHeadStep values, begin at multiples of 16 bytes where the
// first does. Slots begin where those of heads and sequences do.
uint32_t bounds_of(const Problem& p, const KernelArgs& args) {
  const auto of = [&](const Format& format, int64_t slot, int64_t head, int64_t sequence) {
    Problem rows = p;
    rows.format = &format;
    const auto begin_at = [&](int64_t count, int64_t stride) {
      const int64_t at = stride | 16;
      if (count > 1) rows.w_alignment = std::min(rows.w_alignment, at & -at);
    };
    begin_at(p.attention.kv_heads, head);
    begin_at(p.attention.batch, sequence);
    KernelArgs strides{};
    strides.w_stride = slot;
    return bounds_of_weights(rows, strides);
  };
  const uint32_t keys = of(keys_of(p), args.w_stride, args.head_stride, args.sequence_stride);
  const uint32_t values = of(*p.format, args.w2_stride, args.head2_stride, args.sequence2_stride);
  // Bits of alignment do not say of blocks what they say of dense rows.
  const uint32_t of_one = kBoundsAlignedWeight | kBoundsWordBlocks | kBoundsLongBlocks;
  const bool is_apart = keys_of(p).layout != p.format->layout;
  const uint32_t out = (keys & values) | (is_apart ? (keys | values) & of_one : 0u);
  return out | (p.x_alignment % 16 == 0 ? kBoundsAlignedX : 0u);
}

// Rows of q of a threadgroup.
int64_t rows_of(StrategyId strategy, const Problem& p) {
  if (strategy == S::attention_tile) return AttentionTileGeometry::kRows;
  const int64_t rows = rows_of_head(p), most = AttentionSplitGeometry::kRows;
  return ceil_div(rows, ceil_div(rows, most));
}

uint32_t bytes_of(StrategyId strategy, const Problem& p) {
  const int bytes = strategy == S::attention_tile
                        ? AttentionTileGeometry::threadgroup_bytes(p.dtype == DType::kF16)
                        : AttentionSplitGeometry::threadgroup_bytes(
                              static_cast<int>(p.k), static_cast<int>(rows_of(strategy, p)));
  return static_cast<uint32_t>(round_up(bytes, 16));
}

Pass pass_of(StrategyId strategy, const Problem& p, int64_t parts) {
  const AttentionSizes& a = p.attention;
  const int64_t tiles = ceil_div(rows_of_head(p), rows_of(strategy, p));
  const int64_t batch = product(a.batch, is_alone(p) ? a.queries : 1);
  Pass out = bare_pass(strategy, p.format->codec, p.dtype, args_of(p, parts));
  out.grid = {u32(product(tiles, parts), "grid"), u32(a.kv_heads, "grid"), u32(batch, "grid")};
  out.threadgroup_bytes = bytes_of(strategy, p);
  out.constants[kConstantK] = out.args.k;
  out.constants[kConstantEpilogue] = bits_of(p) | (parts > 1 ? kEpiloguePartial : 0u);
  out.constants[kConstantBounds] = bounds_of(p, out.args);
  if (strategy == S::attention_split) {
    out.constants[kConstantBatch] = static_cast<uint32_t>(rows_of(strategy, p));
  }
  return out;
}

Pass join_of(const Problem& p, const Pass& first) {
  Pass out = bare_pass(S::attention_join, Codec::kCount, p.dtype, first.args);
  out.grid = {first.args.m, 1, 1};
  out.constants[kConstantK] = first.args.k;
  out.constants[kConstantEpilogue] = bits_of(p);
  return out;
}

// plan() by torch's attention.
Plan plan_sdpa(const Problem& p, Reason reason) {
  check_sdpa(p);
  Plan out;
  out.sdpa = sdpa_panels(p);
  const auto& [sequences, heads, queries, is_causal, is_masked] = out.sdpa;
  if (is_masked) {
    reason.add("; a mask for ", queries, " queries at a time");
  } else {
    reason.add(is_causal ? "; causal, no mask" : "; all slots, no mask");
  }
  if (!is_readable(p)) {
    reason.add(", rows of ", sequences, " sequences and ", heads, " heads decoded at a time");
  }
  return out;
}

StrategyId choose(const Problem& p, const Gpu& gpu, std::optional<StrategyId> forced,
                  Reason reason) {
  if (forced) {
    reason.add(to_string(*forced), ": forced");
    return *forced;
  }
  if (!is_alone(p) && sdpa_pays(p, gpu, reason)) return S::sdpa;
  const int64_t rows = rows_of_head(p), most = AttentionSplitGeometry::kMostRows;
  const bool is_split = rows <= most;
  const StrategyId out = is_split ? S::attention_split : S::attention_tile;
  reason.add(to_string(out), ": ", rows, " rows of q for a head of keys are ",
             is_split ? "at most " : "over ", most,
             is_split ? ": lanes share the values of a slot" : ": matrix-unit tiles of 32 rows");
  return out;
}

}  // namespace

bool has_attention(const Format& format, int64_t k) {
  return is_stored(format.codec) && k >= kHeadStep && k % kHeadStep == 0 && k <= kMaxHeadValues;
}

bool has_half_keys(const Format& keys, const Format& values) {
  return keys.codec == Codec::F16 && values.codec != Codec::F16;
}

bool is_pair_of_kernels(const Format& keys, const Format& values) {
  return keys.codec == values.codec || has_half_keys(keys, values);
}

void check_attention(const Problem& p) {
  const AttentionSizes& a = p.attention;
  if (a.batch < 0 || a.heads < 1 || a.kv_heads < 1 || a.queries < 0 || a.heads % a.kv_heads) {
    reject("attention: batch ", a.batch, ", heads ", a.heads, ", kv_heads ", a.kv_heads,
           ", queries ", a.queries, "; none may be negative, heads a multiple of kv_heads");
  }
  if (!has_attention(*p.format, p.k)) {
    reject("attention: heads of ", p.k, " values of ", p.format->name, "; allowed: multiples of ",
           kHeadStep, " up to ", kMaxHeadValues, ", of formats that a shader stores");
  }
  if (p.n > INT32_MAX / 2 || a.queries > INT32_MAX / 2) {  // the sum still fits 32 bits
    reject("attention: ", p.n, " slots, ", a.queries, " queries; at most ", INT32_MAX / 2);
  }
  if (is_alone(p) && (!a.causal || a.bool_mask || a.float_mask)) {
    reject("exact_rows: ", a.queries,
           " queries with a mask, or that see what is behind; "
           "causal ones without a mask are computed as if each were alone");
  }
  if (a.window < 0) reject("window: ", a.window, "; at least 1, 0 for none");
  if (a.bool_mask && a.float_mask) reject("mask: of bools or of f32, not both");
  if (a.pages && (a.bool_mask || a.float_mask || a.filled || p.n % kPageSlots)) {
    reject("pages: of whole pages of ", kPageSlots, " slots, with lengths and without a mask");
  }
}

Plan plan_attention(const Problem& p, const Gpu& gpu, std::optional<StrategyId> forced,
                    Reason reason) {
  Plan out;
  const AttentionSizes& a = p.attention;
  if (a.batch == 0 || a.queries == 0) {
    reason.add(kNoOutput);
    return out;
  }
  check_sizes(p);
  const StrategyId strategy = choose(p, gpu, forced, reason);
  if (strategy == S::sdpa) return plan_sdpa(p, reason);
  check_fits("gpu", strategy, bytes_of(strategy, p), gpu);
  const int64_t parts = parts_of(p);
  out.passes.push_back(pass_of(strategy, p, parts));
  choose_loads(strategy, p, gpu, out.passes[0]);
  if (parts > 1) {
    const int64_t results = product(out.passes[0].args.m, parts);
    out.workspace_bytes = static_cast<size_t>(product(results, (p.k + 2) * 4));
    reason.add("; the slots in up to ", parts, " parts");
    out.passes.push_back(join_of(p, out.passes[0]));
  }
  return out;
}

}  // namespace metalmm
