#include "cpu/ops.h"
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
  Turned(const RopeShape& shape, const args::rope& a)
      : a_(a),
        dim_(shape.dim.expect_int()),
        with_weight_(shape.has_whole_norms ? Normed::kWhole : Normed::kHead),
        dtype_(a.qkv.scalar_type()),
        cos_(a.cos.to(at::kFloat).contiguous()),
        sin_(a.sin.to(at::kFloat).contiguous()),
        qkv_(dense_f32(a.qkv)) {}

  at::Tensor q() const { return turned(0, a_.heads, a_.q_norm); }
  at::Tensor k() const { return turned(a_.heads, a_.kv_heads, a_.k_norm); }
  at::Tensor v() const {
    const Normed normed = a_.v_norm ? Normed::kHead : Normed::kNothing;
    if (a_.v.has_value()) return part(dense_f32(*a_.v), 0, a_.kv_heads, 0, normed, std::nullopt);
    return part(qkv_, a_.heads + a_.kv_heads, a_.kv_heads, 0, normed, std::nullopt);
  }

 private:
  at::Tensor turned(int64_t first, int64_t count, const OptionalTensor& norm) const {
    const Normed normed = norm.has_value() ? with_weight_ : Normed::kNothing;
    return part(qkv_, first, count, cos_.size(-1), normed, norm);
  }

  // `count` heads from the head `first`, of which `rotated` values turn: [B, count, S, D].
  at::Tensor part(const at::Tensor& from, int64_t first, int64_t count, int64_t rotated,
                  Normed normed, const OptionalTensor& norm) const {
    const int64_t batch = from.size(0), positions = from.size(1);
    at::Tensor out = at::empty({batch, count, positions, dim_}, from.options());
    if (out.numel() == 0) return out.to(dtype_);
    const std::vector<float> g = norm_factors(norm, a_.offset);
    turn_heads({elements<float>(from) + first * dim_, from.stride(0), from.stride(1), batch,
                positions, count, dim_},
               {elements<float>(cos_), elements<float>(sin_),
                cos_.size(0) > 1 ? positions * cos_.size(-1) : 0, rotated, normed,
                g.empty() ? nullptr : g.data(), static_cast<float>(a_.eps), a_.interleaved},
               out.mutable_data_ptr<float>());
    return out.to(dtype_);
  }

  const args::rope& a_;
  int64_t dim_;
  Normed with_weight_;
  at::ScalarType dtype_;
  at::Tensor cos_, sin_, qkv_;
};

}  // namespace

Heads rope(const args::rope& a) {
  const Turned turned(check(a), a);
  return {turned.q(), turned.k(), turned.v()};
}

// Fails as append_rows does.
at::Tensor rope_append(const args::rope_append& a) {
  const RopeAppendShape shape = check(a);
  check_memory(a);
  check_slots(a.slots, a.keys);
  const args::rope of = rope_of(a);
  const Turned turned(shape.rope, of);
  append_rows({a.keys, a.values, shape.cache}, turned.k(), turned.v(), a.slots);
  return turned.q();
}

}  // namespace metalmm::cpu
