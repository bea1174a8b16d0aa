#include "composed.h"

#include "ops/composed.h"

namespace metalmm::composed {

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, const Gate& how) {
  at::Tensor g = gate, u = up;
  if (how.limit.has_value()) {
    g = g.clamp_max(*how.limit);
    u = u.clamp(-*how.limit, *how.limit);
  }
  if (how.is_oai) return g * (g * how.alpha).sigmoid() * (u + 1);
  return activate(g, how.activation) * u;
}

GateUp halves_of(const at::Tensor& t, int64_t dim, bool interleaved) {
  if (interleaved) return {t.slice(dim, 0, std::nullopt, 2), t.slice(dim, 1, std::nullopt, 2)};
  const auto halves = t.chunk(2, dim);
  if (halves.size() == 2) return {halves[0], halves[1]};
  return {t, t};  // no rows
}

}  // namespace metalmm::composed
