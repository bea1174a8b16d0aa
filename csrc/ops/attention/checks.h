// The arguments of the ops on a cache, checked as checks.h says.
#pragma once

#include "calls.h"
#include "ops/checks.h"
#include "plan/plan.h"

namespace metalmm {

// The keys and values of a layer: heads of `dim` values.
struct CacheShape {
  const Format &keys, &values;
  c10::SymInt batch, kv_heads, capacity, dim;
};

// k and v f32 / f16 / bf16 [B, kv_heads, S, D], slots int64 [S].
CacheShape check_cache_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& slots,
                              std::string_view format_k, std::string_view format_v);

// The arguments of rope, and of cache_append that gets its k and v.
struct RopeAppendShape {
  RopeShape rope;
  CacheShape cache;
};
RopeAppendShape check_rope_append(const at::Tensor& qkv, const at::Tensor& cos,
                                  const at::Tensor& sin, int64_t heads, int64_t kv_heads,
                                  const at::Tensor& keys, const at::Tensor& values,
                                  const at::Tensor& slots, std::string_view format_k,
                                  std::string_view format_v, const RopeOptions& options);

struct AttentionShape {
  CacheShape cache;
  c10::SymInt heads, queries;
};
AttentionShape check_attention(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, std::string_view format_k,
                               std::string_view format_v, const OptionalTensor& length,
                               const AttentionOptions& options);

// The call as plan() takes it, without what a kernel needs to know of memory, over so many slots.
// filled: all of them hold rows. The format is that of keys, unless only values are to be decoded.
Problem attention_problem(const at::Tensor& q, const AttentionShape& shape,
                          const AttentionOptions& options, int64_t slots, bool filled);

// How attention is computed: the strategies that the op has on every engine.
enum class AttentionWay { kSplit, kTile, kTorch, kSdpa };
constexpr const char* kAttentionWays[] = {"attention_split", "attention_tile", "torch", "sdpa"};
// ValueError that lists them.
std::optional<AttentionWay> find_way(const AttentionOptions& options);

// What a device would have to be waited for: the value of a length, and of slots, on the CPU.
int64_t check_length(const at::Tensor& length, const at::Tensor& keys, const OptionalTensor& mask);
void check_slots(const at::Tensor& slots, int64_t capacity);

// The factor of the scores: 1 / sqrt(D) unless given.
double scale_of(const AttentionOptions& options, int64_t dim);

}  // namespace metalmm
