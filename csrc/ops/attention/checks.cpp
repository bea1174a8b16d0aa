#include "checks.h"

#include <algorithm>
#include <cmath>

#include "metal/geometry.h"
#include "ops/dtypes.h"
#include "ops/exact_rows.h"
#include "ops/tensors.h"
#include "plan/passes.h"

namespace metalmm {
namespace {

using Size = c10::SymInt;

void check_dims(const char* name, const at::Tensor& t, const char* shape) {
  TORCH_CHECK_VALUE(t.dim() == 4, name, ": shape ", t.sym_sizes(), "; must be ", shape);
}

// The format of a cache, read from its name.
struct RowFormat {
  const Format& format;
  bool is_rotated;
};

RowFormat check_row_format(std::string_view name) {
  const size_t end = name.size() - std::min(name.size(), kRotated.size());
  const bool is_rotated = name.substr(end) == kRotated;
  const Format& f = check_format(is_rotated ? name.substr(0, end) : name);
  TORCH_CHECK_VALUE(
      !is_rotated || (f.layout != Layout::kDense && f.block_values % kHadamardValues == 0),
      "format: ", name, "; only rows of packed blocks of ", kHadamardValues, " values are rotated");
  return {f, is_rotated};
}

// Rows of `dim` values of a format: [B, kv_heads, capacity, row].
RowFormat check_rows(const char* name, const at::Tensor& rows, std::string_view format,
                     const Size& dim, const at::Tensor& x) {
  const RowFormat out = check_row_format(format);
  const Format& f = out.format;
  check_device(name, rows, x);
  check_dims(name, rows, "[B, kv_heads, capacity, row]");
  check_k(name, f, dim);
  check_row(name, rows, f, dim);
  return out;
}

// The cache of an op, checked.
template <class Args>
CacheShape check_cache(const Args& a, const Size& dim, const at::Tensor& x) {
  const Tensor &keys = a.keys, &values = a.values;
  TORCH_CHECK_VALUE(dim >= 1, "D: ", dim, "; at least 1");
  const RowFormat key = check_rows("keys", keys, a.format_k, dim, x);
  const RowFormat value = check_rows("values", values, a.format_v, dim, x);
  const CacheShape out{key.format,       value.format, keys.sym_size(0), keys.sym_size(1),
                       keys.sym_size(2), dim,          key.is_rotated,   value.is_rotated};
  for (int64_t d = 0; d < 3; ++d) {
    TORCH_CHECK_VALUE(values.sym_size(d) == keys.sym_size(d), "values: shape ", values.sym_sizes(),
                      "; keys are ", keys.sym_sizes());
  }
  return out;
}

void check_int64(const char* name, const at::Tensor& t, const char* shape, bool fits,
                 const at::Tensor& x) {
  check_device(name, t, x);
  TORCH_CHECK_VALUE(t.scalar_type() == at::kLong && fits, name, ": ", t.scalar_type(), " ",
                    t.sym_sizes(), "; must be int64 ", shape);
}

// A cache in pages is one of all sequences.
template <class Args>
void check_one_cache(const char* name, const Args& a) {
  TORCH_CHECK_VALUE(a.keys.sym_size(0) == 1, "keys: shape ", a.keys.sym_sizes(), "; with ", name,
                    " [B, ...] must be [1, kv_heads, slots, row], the cache of all sequences");
}

// New rows of a cache: [batch, kv_heads, count, dim], of the argument x.
struct NewRows {
  const char* name;
  const at::Tensor& x;
  Size batch, kv_heads, count, dim;
};

template <class Args>
CacheShape check_append(const Args& a, const NewRows& rows) {
  const Tensor& slots = a.slots;
  check_int64("slots", slots, "[S] or [B, S]", slots.dim() == 1 || slots.dim() == 2, rows.x);
  const bool in_pages = slots.dim() == 2;
  if (in_pages) check_one_cache("slots", a);
  const CacheShape out = check_cache(a, rows.dim, rows.x);
  check_packs("format_k", out.keys);
  check_packs("format_v", out.values);
  const Size batch = in_pages ? slots.sym_size(0) : out.batch;
  TORCH_CHECK_VALUE(rows.batch == batch && rows.kv_heads == out.kv_heads, rows.name, ": shape ",
                    rows.x.sym_sizes(), "; [B, kv_heads] is [", rows.batch, ", ", rows.kv_heads,
                    "], of the ", in_pages ? "slots and the cache [" : "cache [", batch, ", ",
                    out.kv_heads, "]");
  TORCH_CHECK_VALUE(slots.sym_size(-1) == rows.count, "slots: ", slots.sym_size(-1), "; ",
                    rows.name, " has ", rows.count, " rows");
  return out;
}

void check_mask(const at::Tensor& mask, const AttentionShape& s, const at::Tensor& q) {
  check_device("mask", mask, q);
  if (mask.scalar_type() != at::kBool) check_activation_dtype("mask", mask);
  check_dims("mask", mask, "[B or 1, heads or 1, S, T]");
  const auto fits = [&](int64_t d, const Size& n) {
    return mask.sym_size(d) == 1 || mask.sym_size(d) == n;
  };
  TORCH_CHECK_VALUE(fits(0, s.cache.batch) && fits(1, s.heads) && mask.sym_size(2) == s.queries,
                    "mask: shape ", mask.sym_sizes(), "; must be [1 or ", s.cache.batch, ", 1 or ",
                    s.heads, ", ", s.queries, ", T]");
}

void check_pages(const args::attention& a, const CacheShape& cache) {
  const Tensor &q = a.q, &pages = *a.pages;
  const Size& batch = q.sym_size(0);
  check_int64("pages", pages, "[B, N]", pages.dim() == 2 && pages.sym_size(0) == batch, q);
  check_one_cache("pages", a);
  TORCH_CHECK_VALUE(cache.capacity % kPageSlots == 0, "keys: ", cache.capacity,
                    " slots; with pages a multiple of ", kPageSlots);
  TORCH_CHECK_VALUE(cache.capacity <= UINT32_MAX, "keys: ", cache.capacity,
                    " slots; with pages at most ", UINT32_MAX, ", which shaders count");
  TORCH_CHECK_VALUE(a.length.has_value(), "length: None; with pages int64 [B]");
  check_int64("length", *a.length, "[B] with pages",
              a.length->dim() == 1 && a.length->sym_size(0) == batch, q);
  TORCH_CHECK_VALUE(!a.mask.has_value(), "mask: given with pages; must be None");
}

}  // namespace

CacheShape check(const args::cache_append& a) {
  const Tensor &k = a.k, &v = a.v;
  check_activation_dtype("k", k);
  check_activation_dtype("v", v);
  check_dims("k", k, "[B, kv_heads, S, D]");
  check_device("v", v, k);
  TORCH_CHECK_VALUE(v.sym_sizes() == k.sym_sizes(), "v: shape ", v.sym_sizes(), "; k is ",
                    k.sym_sizes());
  return check_append(a, {"k", k, k.sym_size(0), k.sym_size(1), k.sym_size(2), k.sym_size(3)});
}

args::rope rope_of(const args::rope_append& a) {
  return {a.qkv,    a.cos,    a.sin, a.heads,  a.kv_heads,    a.v,
          a.q_norm, a.k_norm, a.eps, a.offset, a.interleaved, a.v_norm};
}

RopeAppendShape check(const args::rope_append& a) {
  const RopeShape rope = check(rope_of(a));
  return {rope, check_append(a, {"qkv", a.qkv, rope.batch, a.kv_heads, rope.positions, rope.dim})};
}

AttentionShape check(const args::attention& a) {
  const Tensor& q = a.q;
  check_activation_dtype("q", q);
  check_dims("q", q, "[B, heads, S, D]");
  const AttentionShape out{check_cache(a, q.sym_size(3), q), q.sym_size(1), q.sym_size(2)};
  if (a.pages.has_value()) {
    check_pages(a, out.cache);
  } else {
    TORCH_CHECK_VALUE(q.sym_size(0) == out.cache.batch, "q: shape ", q.sym_sizes(),
                      "; the cache has ", out.cache.batch, " sequences");
    if (a.length.has_value()) check_int64("length", *a.length, "[]", a.length->dim() == 0, q);
  }
  TORCH_CHECK_VALUE(out.cache.kv_heads >= 1 && out.heads % out.cache.kv_heads == 0,
                    "q: ", out.heads, " heads; must be a multiple of the ", out.cache.kv_heads,
                    " of the cache");
  if (a.mask.has_value()) {
    check_mask(*a.mask, out, q);
    TORCH_CHECK_VALUE(a.length.has_value() || a.mask->sym_size(3) >= out.cache.capacity,
                      "mask: ", a.mask->sym_size(3), " columns; without a length all ",
                      out.cache.capacity, " slots are read");
  }
  check_addend("sinks", a.sinks, {out.heads}, q);
  check_f32("scale", a.scale.value_or(1));
  check_softcap(a.softcap);
  TORCH_CHECK_VALUE(a.window >= 0, "window: ", a.window, "; at least 1, 0 for none");
  find_way(a);
  return out;
}

Problem attention_problem(const args::attention& o, const AttentionShape& shape, int64_t slots,
                          bool filled) {
  const Tensor& q = o.q;
  Problem p;
  p.op = Op::kAttention;
  p.n = slots;
  p.k = q.size(3);
  p.dtype = find_dtype(q.scalar_type()).value();
  p.format = &shape.cache.keys;
  if (is_readable(p)) p.format = &shape.cache.values;
  AttentionSizes& a = p.attention;
  a.batch = q.size(0);
  a.heads = q.size(1);
  a.kv_heads = shape.cache.kv_heads.expect_int();
  a.queries = q.size(2);
  p.exact_rows = are_exact(a.queries);
  a.window = window_of(o);
  a.scale = static_cast<float>(scale_of(o));
  a.softcap = static_cast<float>(o.softcap);
  a.causal = o.causal;
  a.sinks = o.sinks.has_value();
  a.filled = filled;
  if (o.pages.has_value()) a.pages = o.keys.size(2) / kPageSlots;
  if (!o.mask.has_value()) return p;
  const auto stride = [&](int64_t d) { return o.mask->size(d) == 1 ? 0 : o.mask->stride(d); };
  a.mask_sequence_stride = stride(0);
  a.mask_head_stride = stride(1);
  a.mask_stride = stride(2);
  (o.mask->scalar_type() == at::kBool ? a.bool_mask : a.float_mask) = true;
  return p;
}

std::optional<AttentionWay> find_way(const args::attention& a) {
  if (!a.strategy.has_value()) return std::nullopt;
  return static_cast<AttentionWay>(check_word("strategy", *a.strategy, kAttentionWays));
}

std::vector<int64_t> check_lengths(const args::attention& a) {
  if (!a.length.has_value()) return std::vector<int64_t>(a.q.size(0), a.keys.size(2));
  const at::Tensor given = a.length->contiguous();
  const int64_t* at = elements<int64_t>(given);
  const bool in_pages = a.pages.has_value();
  const int64_t capacity = in_pages ? a.pages->size(1) * kPageSlots : a.keys.size(2);
  std::vector<int64_t> out(at, at + given.numel());
  for (const int64_t n : out) {
    TORCH_CHECK_VALUE(n >= 0 && n <= capacity, "length: ", n, "; ",
                      in_pages ? "the pages have " : "the cache has ", capacity, " slots");
    TORCH_CHECK_VALUE(!a.mask.has_value() || a.mask->size(3) >= n,
                      "mask: ", a.mask.has_value() ? a.mask->size(3) : 0, " columns; length is ",
                      n);
  }
  if (!in_pages) out.resize(a.q.size(0), out[0]);
  return out;
}

void check_page_numbers(const args::attention& a) {
  if (!a.pages.has_value()) return;
  check_ids(*a.pages, a.keys.size(2) / kPageSlots, "the cache", "pages", "pages");
}

void check_slots(const at::Tensor& slots, const at::Tensor& keys) {
  check_ids(slots, keys.size(2), "the cache", "slots", "slots");
}

double scale_of(const args::attention& a) {
  return a.scale.value_or(1 / std::sqrt(static_cast<double>(a.q.size(3))));
}

int64_t window_of(const args::attention& a) { return std::min(a.window, kMaxK); }

}  // namespace metalmm
