#include "autograd.h"

#include <utility>

#include "checks.h"
#include "composed.h"
#include "ops/gradients.h"
#include "ops/tensors.h"

namespace metalmm::gradients {
namespace {

// What autograd asks of an op that writes its arguments.
void bump_versions(const Tensor& keys, const Tensor& values) {
  for (const Tensor& rows : {keys, values}) {
    if (!rows.is_inference()) rows.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, Name format_k,
                 Name format_v, const OptionalTensor& length, const OptionalTensor& mask,
                 std::optional<double> scale, double softcap, int64_t window,
                 const OptionalTensor& sinks, bool causal, OptionalName strategy) {
  const AttentionOptions options{mask, scale, softcap, window, sinks, causal, strategy};
  if (records_grad("attention", q, keys, values, mask, sinks)) {
    check_attention(q, keys, values, format_k, format_v, length, options);
    for (const Tensor& rows : {keys, values}) {
      TORCH_CHECK_VALUE(rows.scalar_type() != at::kByte,
                        "q: requires grad, but attention has no gradient through packed rows; pass "
                        "q.detach(), call it under torch.no_grad(), or use a cache of floats");
    }
    if (length.has_value() && holds_values(*length)) check_length(*length, keys, mask);
    return composed::attention(q, keys, values, length, options);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention(q, keys, values, format_k, format_v, length, options);
}

void cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                  const Tensor& slots, Name format_k, Name format_v) {
  TORCH_CHECK_VALUE(!records_grad("cache_append", keys, values, k, v),
                    "k: requires grad, but a cache keeps no gradient; pass k.detach(), or call it "
                    "under torch.no_grad()");
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    call_cache_append(keys, values, k, v, slots, format_k, format_v);
  }
  bump_versions(keys, values);
}

void cache_append_of_views(const Tensor& keys, const Tensor& values, const Tensor& k,
                           const Tensor& v, const Tensor& slots, Name format_k, Name format_v) {
  for (const auto& [name, rows] : {std::pair{"keys", keys}, std::pair{"values", values}}) {
    TORCH_CHECK_VALUE(!rows.is_neg() && !rows.is_conj(), name,
                      ": a negated or conjugate view, which is not written; pass the tensor");
  }
  const auto plain = [](const Tensor& t) { return t.resolve_neg().resolve_conj(); };
  call_cache_append(keys, values, plain(k), plain(v), plain(slots), format_k, format_v);
}

Tensor rope_append(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads,
                   int64_t kv_heads, const Tensor& keys, const Tensor& values, const Tensor& slots,
                   Name format_k, Name format_v, const OptionalTensor& v,
                   const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                   double offset, bool interleaved) {
  TORCH_CHECK_VALUE(!records_grad("rope_append", qkv, cos, sin, keys, values, v, q_norm, k_norm),
                    "qkv: requires grad, but a cache keeps no gradient; pass qkv.detach(), or call "
                    "rope_append under torch.no_grad()");
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor q = call_rope_append(qkv, cos, sin, heads, kv_heads, keys, values, slots, format_k,
                                    format_v, {v, q_norm, k_norm, eps, offset, interleaved});
  bump_versions(keys, values);
  return q;
}

}  // namespace metalmm::gradients
