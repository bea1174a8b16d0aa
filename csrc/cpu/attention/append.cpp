#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/quantize/quantize.h"
#include "cpu/rows.h"
#include "new_rows.h"
#include "ops/attention/memory.h"
#include "ops/tensors.h"

namespace metalmm::cpu {
namespace {

// New rows of keys or of values: from `from` [B, kv_heads, S, D] f32 to the slots of `to`.
class Append {
 public:
  Append(const char* name, const at::Tensor& cache, const at::Tensor& rows, const Format& format,
         bool is_rotated)
      : from_(rows.detach().to(at::kFloat).contiguous()), to_(cache), format_(format) {
    TORCH_CHECK_VALUE(cache.stride(3) == 1, name == std::string("k") ? "keys" : "values",
                      ": the values of a row must lie side by side");
    if (is_rotated) from_ = hadamard(args::hadamard{from_});
    if (format.name == "f16") check_f16(name);
    if (format.layout == Layout::kDense) return;
    TORCH_CHECK_VALUE(all_finite(elements<float>(from_), from_.numel()), name,
                      ": has NaN or Inf, which ", format.name, " cannot hold");
  }

  // slots [S], or [B, S] of a cache of all sequences.
  void write(const at::Tensor& given) const {
    const int64_t kv_heads = from_.size(1), count = from_.size(2), dim = from_.size(3);
    const int64_t* slots = elements<int64_t>(given);
    const bool in_pages = given.dim() == 2;
    const int64_t size = to_.element_size();
    auto* base = static_cast<uint8_t*>(to_.mutable_data_ptr());
    const float* x = elements<float>(from_);
    parallel_for(0, from_.size(0) * kv_heads * count, std::max<int64_t>(1, (1 << 14) / dim),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     const int64_t head = i / count, b = head / kv_heads;
                     const int64_t slot = slots[i % count + (in_pages ? b * count : 0)];
                     const int64_t row = (in_pages ? 0 : b * to_.stride(0)) +
                                         head % kv_heads * to_.stride(1) + slot * to_.stride(2);
                     quantize_row(format_, x + i * dim, dim, base + row * size);
                   }
                 });
  }

 private:
  // ValueError: a finite value would become infinite. Engines of GPUs store it so: they would have
  // to wait for each step to say it.
  void check_f16(const char* name) const {
    const float* x = elements<float>(from_);
    const float* bad = std::find_if(x, x + from_.numel(), [](float v) {
      return std::isfinite(v) && std::abs(v) >= 65520;  // values that round to 65504 are below
    });
    TORCH_CHECK_VALUE(bad == x + from_.numel(), name, ": has ", *bad,
                      ", which f16 cannot hold; take a cache of bf16 or f32");
  }

  at::Tensor from_, to_;
  const Format& format_;
};

}  // namespace

void append_rows(const Cache& cache, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& slots) {
  if (k.numel() == 0) return;
  const Append new_keys("k", cache.keys, k, cache.shape.keys, cache.shape.rotated_keys);
  const Append new_values("v", cache.values, v, cache.shape.values, cache.shape.rotated_values);
  const at::Tensor at = slots.contiguous();
  new_keys.write(at);
  new_values.write(at);
}

// Fails as append_rows does.
void cache_append(const args::cache_append& a) {
  const CacheShape shape = check(a);
  check_memory(a);
  check_slots(a.slots, a.keys);
  append_rows({a.keys, a.values, shape}, a.k, a.v, a.slots);
}

}  // namespace metalmm::cpu
