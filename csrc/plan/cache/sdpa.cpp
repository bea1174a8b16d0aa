// attention by torch's scaled_dot_product_attention: where, and how much of it at a time.
#include <algorithm>

#include "plan/passes.h"

namespace metalmm {
namespace {

// Bytes that decoded rows of keys and values may take at a time, and a mask: more than those rows,
// as the queries of a mask are all that fills the machine. At 131072 slots 341 queries, 3 tiles of
// 128 for each head of q.
constexpr int64_t kPanelBytes = int64_t{64} << 20, kMaskBytes = 2 * kPanelBytes;

struct SdpaFrom {
  Accelerator accelerator;
  DType dtype;
  int64_t queries, slots, rows;
};

constexpr SdpaFrom kSdpaFrom[] = {
#define MM_SDPA_FROM(accelerator, dtype, queries, slots, rows) \
  {Accelerator::accelerator, DType::dtype, queries, slots, rows},
#include "plan/tuning.def"
};

// An operand that torch's attention has no argument for, or rounds to q's dtype; or "".
const char* lacking(const AttentionSizes& a) {
  return a.softcap != 0 ? "soft cap"
         : a.sinks      ? "sinks"
         : a.float_mask ? "mask that is added"
         : a.pages      ? "pages"
                        : "";
}

// Bytes for one query: bools, and what torch makes of them.
int64_t mask_bytes(const Problem& p) {
  const AttentionSizes& a = p.attention;
  const int64_t rows = product(a.bool_mask && a.mask_sequence_stride ? a.batch : 1,
                               a.bool_mask && a.mask_head_stride ? a.heads : 1);
  return product(product(rows, p.n), 1 + dtype_bytes(p.dtype));
}

// Rows of q of a panel; where one is all, as many as anyone asks.
int64_t rows_of_panel(const Problem& p) {
  const AttentionSizes& a = p.attention;
  const SdpaPanels panels = sdpa_panels(p);
  const int64_t heads = product(panels.sequences, panels.heads);
  if (heads == product(a.batch, a.kv_heads) && panels.queries == a.queries) return INT64_MAX;
  return product(product(heads, a.heads / a.kv_heads), panels.queries);
}

}  // namespace

bool sdpa_pays(const Problem& p, const Gpu& gpu, Reason why) {
  const AttentionSizes& a = p.attention;
  if (gpu.sdpa_queries) {
    if (a.queries < gpu.sdpa_queries || !has_sdpa(p)) return false;
    why.add("sdpa: ", a.queries, " queries are at least the ", gpu.sdpa_queries, " asked for");
    return true;
  }
  for (const SdpaFrom& from : kSdpaFrom) {
    if (from.accelerator != gpu.accelerator || from.dtype != p.dtype) continue;
    if (a.queries < from.queries || !has_sdpa(p)) continue;
    if (!a.filled && p.n > product(a.queries, from.slots)) continue;
    if (rows_of_panel(p) < from.rows) continue;
    why.add("sdpa: ", a.queries, " queries are at least ", from.queries,
            ", and torch's attention reaches the tensor cores at full rate");
    return true;
  }
  return false;
}

bool has_sdpa(const Problem& p) { return !*lacking(p.attention); }

void check_sdpa(const Problem& p) {
  if (!has_sdpa(p)) {
    reject("strategy: sdpa computes attention without ", lacking(p.attention),
           "; allowed: attention_split, attention_tile, torch");
  }
}

SdpaPanels sdpa_panels(const Problem& p) {
  const AttentionSizes& a = p.attention;
  SdpaPanels out{a.batch, a.kv_heads, a.queries, false, false};
  const bool hides_later = a.causal && (a.queries > 1 || p.n < 1);
  const bool is_plain = a.filled && !a.bool_mask && (a.window == 0 || a.window >= p.n);
  out.is_causal = is_plain && hides_later && a.queries == p.n;
  out.is_masked = !is_plain || (hides_later && !out.is_causal);
  if (out.is_masked) {
    const int64_t most = kMaskBytes / std::max<int64_t>(mask_bytes(p), 1);
    out.queries = std::clamp<int64_t>(most, 1, std::max<int64_t>(a.queries, 1));
  }
  if (is_readable(p)) return out;
  const int64_t head_bytes = product(product(2 * dtype_bytes(p.dtype), p.k), p.n);
  const int64_t most = kPanelBytes / std::max<int64_t>(head_bytes, 1);  // heads of a sequence
  out.heads = std::clamp<int64_t>(most, 1, a.kv_heads);
  out.sequences = std::clamp<int64_t>(most / a.kv_heads, 1, std::max<int64_t>(a.batch, 1));
  return out;
}

}  // namespace metalmm
