#include "autograd.h"

#include <utility>

#include "checks.h"
#include "composed.h"
#include "ops/gradients.h"
#include "ops/tensors.h"

namespace metalmm::gradients {

// Through keys and values of a dense format, and what they are multiplied by, a gradient is that of
// composed::attention; a packed cache has none.
Tensor recorded(const args::attention& a) {
  for (const Tensor& entries : {a.keys, a.values}) {
    TORCH_CHECK_VALUE(
        entries.scalar_type() != at::kByte,
        "q: requires grad, but attention has no gradient through packed entries; pass "
        "q.detach(), call it under torch.no_grad(), or use a cache of floats");
  }
  TORCH_CHECK_VALUE(!a.pages.has_value(),
                    "pages: attention through pages has no gradient; call it "
                    "under torch.no_grad()");
  if (a.length.has_value() && holds_values(*a.length)) check_lengths(a);
  return composed::attention(a, a.keys, a.values);
}

void cache_append_of_views(const args::cache_append& a) {
  for (const auto& [name, entries] : {std::pair{"keys", a.keys}, std::pair{"values", a.values}}) {
    TORCH_CHECK_VALUE(!entries.is_neg() && !entries.is_conj(), name,
                      ": a negated or conjugate view, which is not written; pass the tensor");
  }
  const auto plain = [](const Tensor& t) { return t.resolve_neg().resolve_conj(); };
  call(args::cache_append{a.keys, a.values, plain(a.k), plain(a.v), plain(a.slots), a.format_k,
                          a.format_v});
}

}  // namespace metalmm::gradients
