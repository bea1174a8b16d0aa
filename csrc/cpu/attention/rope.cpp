#include "attention.h"
#include "cpu/rows.h"
#include "new_rows.h"
#include "ops/attention/memory.h"
#include "ops/tensors.h"

namespace metalmm::cpu {
namespace {

// The last dimension dense, f32.
at::Tensor dense_f32(const at::Tensor& t) {
  const at::Tensor f32 = t.to(at::kFloat);
  return f32.stride(-1) == 1 ? f32 : f32.contiguous();
}

// Heads of a projection, turned in f32 and rounded to its dtype. The arguments are checked.
class Turned {
 public:
  Turned(const RopeShape& shape, const at::Tensor& qkv, const at::Tensor& cos,
         const at::Tensor& sin, const RopeOptions& options)
      : heads_(shape.heads),
        kv_heads_(shape.kv_heads),
        dim_(shape.dim.expect_int()),
        options_(options),
        dtype_(qkv.scalar_type()),
        cos_(cos.to(at::kFloat).contiguous()),
        sin_(sin.to(at::kFloat).contiguous()),
        qkv_(dense_f32(qkv)) {}

  at::Tensor q() const { return part(qkv_, 0, heads_, cos_.size(-1), options_.q_norm); }
  at::Tensor k() const { return part(qkv_, heads_, kv_heads_, cos_.size(-1), options_.k_norm); }
  at::Tensor v() const {
    if (options_.v.has_value()) return part(dense_f32(*options_.v), 0, kv_heads_, 0, std::nullopt);
    return part(qkv_, heads_ + kv_heads_, kv_heads_, 0, std::nullopt);
  }

 private:
  // `count` heads from the head `first`, of which `rotated` values turn: [B, count, S, D].
  at::Tensor part(const at::Tensor& from, int64_t first, int64_t count, int64_t rotated,
                  const OptionalTensor& norm) const {
    const int64_t batch = from.size(0), positions = from.size(1);
    at::Tensor out = at::empty({batch, count, positions, dim_}, from.options());
    if (out.numel() == 0) return out.to(dtype_);
    const std::vector<float> g = norm_factors(norm, options_.offset);
    turn_heads(
        {elements<float>(from) + first * dim_, from.stride(0), from.stride(1), batch, positions,
         count, dim_},
        {elements<float>(cos_), elements<float>(sin_),
         cos_.size(0) > 1 ? positions * cos_.size(-1) : 0, rotated, g.empty() ? nullptr : g.data(),
         static_cast<float>(options_.eps), options_.interleaved},
        out.mutable_data_ptr<float>());
    return out.to(dtype_);
  }

  int64_t heads_, kv_heads_, dim_;
  const RopeOptions& options_;
  at::ScalarType dtype_;
  at::Tensor cos_, sin_, qkv_;
};

}  // namespace

Heads rope(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
           int64_t kv_heads, const OptionalTensor& v, const OptionalTensor& q_norm,
           const OptionalTensor& k_norm, double eps, double offset, bool interleaved) {
  const RopeShape shape =
      check_rope(qkv, cos, sin, heads, kv_heads, v, q_norm, k_norm, eps, offset);
  const RopeOptions options{v, q_norm, k_norm, eps, offset, interleaved};
  const Turned turned(shape, qkv, cos, sin, options);
  return {turned.q(), turned.k(), turned.v()};
}

at::Tensor rope_append(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                       int64_t heads, int64_t kv_heads, const at::Tensor& keys,
                       const at::Tensor& values, const at::Tensor& slots, std::string_view format_k,
                       std::string_view format_v, const OptionalTensor& v,
                       const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                       double offset, bool interleaved) {
  const RopeOptions options{v, q_norm, k_norm, eps, offset, interleaved};
  const RopeAppendShape shape = check_rope_append(qkv, cos, sin, heads, kv_heads, keys, values,
                                                  slots, format_k, format_v, options);
  check_memory_of_rope_append(keys, values, qkv, cos, sin, slots, options);
  check_slots(slots, keys.size(2));
  const Turned turned(shape.rope, qkv, cos, sin, options);
  append_rows({keys, values, shape.cache}, turned.k(), turned.v(), slots);
  return turned.q();
}

}  // namespace metalmm::cpu
