#include "sdpa.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "composed.h"
#include "ops/tensors.h"
#include "plan/passes.h"

namespace metalmm::composed {
namespace {

struct Range {
  int64_t first, last;
  int64_t count() const { return last - first; }
};

at::Tensor part(const at::Tensor& t, int64_t dim, Range at) {
  return t.narrow(dim, at.first, at.count());
}

// A part of a mask, whose dimensions may be 1 for all.
at::Tensor part_of_mask(const at::Tensor& mask, int64_t dim, Range at) {
  return mask.size(dim) == 1 ? mask : part(mask, dim, at);
}

// Torch's kernels of NVIDIA GPUs read 16 bytes at a time: a view that begins between makes them
// give NaN, or fault (torch 2.11).
at::Tensor aligned(const at::Tensor& t) {
  if (!t.is_cuda()) return t;
  bool is_aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) * t.element_size() % 16 != 0) is_aligned = false;
  }
  return is_aligned && t.stride(-1) == 1 ? t : t.clone(at::MemoryFormat::Contiguous);
}

// Whether torch's flash kernels take a call for which it would choose cuDNN. They need no plan of a
// shape, which cuDNN makes in 55 to 75 ms, say for each new length of a prompt (H200, torch 2.11:
// 400 tokens of 24 layers in 75 ms, by flash 16). 32 heads of 8192 queries gain 0.8 ms a layer by
// cuDNN, of 16384 3.1.
bool fits_flash(const at::Tensor& q, int64_t slots) {
  constexpr int64_t kMostScores = int64_t{32} * 12288 * 12288;
  return q.size(3) % 8 == 0 && q.size(3) <= 256 &&
         q.size(0) * q.size(1) * q.size(2) * slots <= kMostScores;
}

struct Call {
  const Problem& p;
  const args::attention& options;
  const OptionalTensor& length;
  SdpaPanels panels;

  // Slots outside of which these queries see none; all where only the device knows.
  Range slots_of(Range queries) const {
    const AttentionSizes& a = p.attention;
    const int64_t before = p.n - a.queries;
    if (!a.filled || !panels.is_masked) return {0, p.n};
    const int64_t last = a.causal ? std::clamp<int64_t>(queries.last + before, 0, p.n) : p.n;
    const int64_t first = a.window ? queries.first + before - a.window + 1 : 0;
    return {std::clamp<int64_t>(first, 0, last), last};
  }

  // The slots that the queries see, as bools of the shape of a part of the mask, or [S, T].
  at::Tensor open(const at::Tensor& mask, Range queries, Range slots,
                  const at::TensorOptions& numbers) const {
    const AttentionSizes& a = p.attention;
    at::Tensor out = mask.defined() ? part(part(mask, 2, queries), 3, slots) : mask;
    if (a.filled && !a.causal && a.window == 0) return out;
    const at::Tensor t = at::arange(slots.first, slots.last, numbers);
    const at::Tensor own = at::arange(queries.first, queries.last, numbers).unsqueeze(1) +
                           (a.filled ? at::full({}, p.n, numbers) : *length) - a.queries;
    at::Tensor seen = visible(t, own, a.window, a.causal);
    if (!a.filled) seen = seen & (t < *length);
    return out.defined() ? out & seen : seen;
  }

  // 0 where nobody wrote: torch multiplies what it hides by 0.
  at::Tensor held(const at::Tensor& rows) const {
    if (p.attention.filled) return rows;
    const at::Tensor t = at::arange(p.n, length->options()).unsqueeze(-1);
    return at::where(t < *length, rows, at::zeros({}, rows.options()));
  }

  // y [b, heads, S, D] of these queries, or no tensor.
  at::Tensor of_queries(const at::Tensor& given, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& mask, Range queries) const {
    const Range slots = slots_of(queries);
    if (slots.count() == 0) return at::zeros_like(given);
    const at::Tensor q = aligned(given);
    const at::Tensor keys = aligned(part(k, 2, slots)), values = aligned(part(v, 2, slots));
    OptionalTensor seen;
    if (panels.is_masked) seen = open(mask, queries, slots, q.options().dtype(at::kLong));
    const bool is_grouped = q.size(1) != keys.size(1);
    // No torch has this choice for MPS, where its attention stores no scores from 2.13 on.
    auto choice = at::SDPBackend::overrideable;
    if (q.is_cuda() || (!options.strategy.has_value() && !q.is_mps())) {
      choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
          q, keys, values, seen, 0.0, panels.is_causal, options.scale, is_grouped));
    }
    if (!options.strategy.has_value() && choice == at::SDPBackend::math) return {};
    const bool by_flash = choice == at::SDPBackend::cudnn_attention && !seen.has_value() &&
                          at::globalContext().userEnabledFlashSDP() && fits_flash(q, keys.size(2));
    const at::Tensor y =
        by_flash ? std::get<0>(at::_scaled_dot_product_flash_attention(
                       q, keys, values, 0.0, panels.is_causal, false, options.scale))
                 : at::scaled_dot_product_attention(q, keys, values, seen, 0.0, panels.is_causal,
                                                    options.scale, is_grouped);
    // A query that sees nothing: torch gives 0 or NaN, by its kernel.
    return seen.has_value() ? y.masked_fill(seen->any(-1, true).logical_not(), 0) : y;
  }
};

}  // namespace

at::Tensor sdpa(const Problem& p, const args::attention& options, const CacheRows& keys,
                const CacheRows& values, const OptionalTensor& length, const Decode& decode) {
  const at::Tensor& q = options.q;
  or_value_error([&] { return check_sdpa(p), 0; });
  const AttentionSizes& a = p.attention;
  at::Tensor out = at::zeros({a.batch, a.queries, a.heads, p.k}, q.options());
  if (out.numel() == 0 || p.n == 0) return out;
  OptionalTensor end;
  if (length.has_value()) end = length->clamp(0, p.n);  // as shaders take it
  const Call call{p, options, end, sdpa_panels(p)};
  const auto& [sequences, heads, queries, is_causal, is_masked] = call.panels;
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t b = 0; b < a.batch; b += sequences) {
    for (int64_t h = 0; h < a.kv_heads; h += heads) {
      const Range of_batch{b, std::min(a.batch, b + sequences)};
      const Range of_keys{h, std::min(a.kv_heads, h + heads)};
      const Range of_q{group * of_keys.first, group * of_keys.last};
      const auto rows = [&](const CacheRows& cache) {
        const at::Tensor some = part(part(cache.rows.narrow(2, 0, p.n), 0, of_batch), 1, of_keys);
        return call.held(decode(some, cache.format).to(q.scalar_type()));
      };
      const at::Tensor k = rows(keys), v = rows(values);
      at::Tensor mask;
      if (options.mask.has_value()) {
        mask = part_of_mask(part_of_mask(*options.mask, 0, of_batch), 1, of_q);
      }
      for (int64_t i = 0; i < a.queries; i += queries) {
        const Range at{i, std::min(a.queries, i + queries)};
        const at::Tensor some = part(part(part(q, 0, of_batch), 1, of_q), 2, at);
        const at::Tensor y = call.of_queries(some, k, v, mask, at);
        if (!y.defined()) return y;
        part(part(part(out, 0, of_batch), 1, at), 2, of_q).copy_(y.transpose(1, 2));
      }
    }
  }
  return out;
}

}  // namespace metalmm::composed
