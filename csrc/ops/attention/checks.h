// The arguments of the ops on a cache, checked as checks.h says.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/checks.h"
#include "plan/plan.h"

namespace metalmm {

// The suffix of a format whose rows are those of hadamard(values).
constexpr std::string_view kRotated = "_rotated";

// The keys and values of a layer: heads of `dim` values.
struct CacheShape {
  const Format &keys, &values;
  c10::SymInt batch, kv_heads, capacity, dim;
  bool rotated_keys, rotated_values;

  bool is_rotated() const { return rotated_keys || rotated_values; }

  // The alignment of rows in the shaders, which have one for keys and values.
  int64_t alignment() const { return std::max(keys.alignment, values.alignment); }
};

// k and v f32 / f16 / bf16 [B, kv_heads, S, D], slots int64 [S].
CacheShape check(const args::cache_append& a);

// The arguments of rope, and of cache_append that gets its k and v.
struct RopeAppendShape {
  RopeShape rope;
  CacheShape cache;
};
RopeAppendShape check(const args::rope_append& a);
// The part of rope, of the same tensors.
args::rope rope_of(const args::rope_append& a);

struct AttentionShape {
  CacheShape cache;
  c10::SymInt heads, queries;
};
AttentionShape check(const args::attention& a);

// The call as plan() takes it, without what a kernel needs to know of memory, over so many slots.
// filled: all of them hold rows. The format is that of keys, unless only values are to be decoded.
Problem attention_problem(const args::attention& a, const AttentionShape& shape, int64_t slots,
                          bool filled);

// Attention over a cache that is_rotated(), by that over the rows as they are: q and the result
// pass through hadamard(t), where keys and where values have. q kᵀ = (q H)(k H)ᵀ.
template <class Hadamard, class Attend>
at::Tensor attend_rotated(const args::attention& a, const CacheShape& cache,
                          const Hadamard& hadamard, const Attend& attend) {
  const at::Tensor q = cache.rotated_keys ? hadamard(a.q) : a.q;
  const at::Tensor y = attend(
      args::attention{q, a.keys, a.values, cache.keys.name, cache.values.name, a.length, a.mask,
                      a.scale, a.softcap, a.window, a.sinks, a.causal, a.strategy, a.pages});
  return cache.rotated_values ? hadamard(y) : y;
}

// How attention is computed: the strategies that the op has on every engine.
enum class AttentionWay { kSplit, kTile, kTorch, kSdpa };
constexpr const char* kAttentionWays[] = {"attention_split", "attention_tile", "torch", "sdpa"};
// ValueError that lists them.
std::optional<AttentionWay> find_way(const args::attention& a);

// Checks that would have to wait for a device: the values of lengths on the CPU, one for each
// sequence; those of pages and of slots, where the host has them.
std::vector<int64_t> check_lengths(const args::attention& a);
void check_page_numbers(const args::attention& a);
void check_slots(const at::Tensor& slots, const at::Tensor& keys);

// The factor of the scores: 1 / sqrt(D) unless given.
double scale_of(const args::attention& a);

// The window, at most kMaxK, as many slots as any cache has: sums with it do not overflow.
int64_t window_of(const args::attention& a);

}  // namespace metalmm
