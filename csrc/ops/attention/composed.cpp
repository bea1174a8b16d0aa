#include "composed.h"

#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "ops/tensors.h"

namespace metalmm::composed {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// f16 bytes of d [N], [N, 2].
at::Tensor half_bytes(const at::Tensor& d) { return d.to(at::kHalf).unsqueeze(-1).view(at::kByte); }

// t / divisor with one rounding: of a number, CUDA's division multiplies by the reciprocal.
at::Tensor divided(const at::Tensor& t, double divisor) {
  return t / at::full({1}, divisor, t.options());
}

at::Tensor inverse_or_0(const at::Tensor& d) {
  return at::where(d == 0, at::zeros_like(d), at::ones_like(d) / d).unsqueeze(-1);
}

at::Tensor q8_0(const at::Tensor& x) {
  const at::Tensor d = divided(x.abs().amax(-1), 127);
  const at::Tensor v = at::nan_to_num(x * inverse_or_0(d), -128.0);
  const at::Tensor whole = v.trunc();
  const at::Tensor away = at::copysign(((v - whole).abs() >= 0.5).to(at::kFloat), v);
  const at::Tensor q = (whole + away).clamp(-128, 127).to(at::kChar);
  return at::cat({half_bytes(d), q.view(at::kByte)}, -1);
}

at::Tensor q4_0(const at::Tensor& x) {
  // The element of largest size, the first of equals: argmax does not say which it takes.
  const at::Tensor size = x.abs(), largest = size.amax(-1, true);
  const at::Tensor index = at::arange(x.size(-1), x.options().dtype(at::kLong));
  const at::Tensor first =
      at::where(size == largest, index, at::full_like(index, x.size(-1) - 1)).amin(-1, true);
  const at::Tensor top = x.gather(-1, first).squeeze(-1);
  const at::Tensor d = divided(at::where(top == 0, at::zeros_like(top), top), -8);
  const at::Tensor q =
      at::nan_to_num(x * inverse_or_0(d) + 8.5, 0.0).trunc().clamp(0, 15).to(at::kByte);
  const auto halves = q.chunk(2, -1);
  const at::Tensor scale = at::where(largest.squeeze(-1).isfinite(), d, d * NAN);
  return at::cat({half_bytes(scale), halves[0] | halves[1] * 16}, -1);
}

}  // namespace

namespace {

// q kᵀ [..., S, T] of q [..., S, D] and k [..., T, D]. In parts of the slots: its gradient of q is
// a product over them.
at::Tensor scores(const at::Tensor& q, const at::Tensor& k) {
  const int64_t slots = k.size(2);
  if (slots <= kMostInner) return at::matmul(q, k.transpose(-1, -2));
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : k.split(kMostInner, 2)) {
    parts.push_back(at::matmul(q, part.transpose(-1, -2)));
  }
  return at::cat(parts, -1);
}

// p v [..., S, D] of p [..., S, T] and v [..., T, D].
at::Tensor weighted(const at::Tensor& p, const at::Tensor& v) {
  at::Tensor out;
  for (int64_t t = 0; t < v.size(2); t += kMostInner) {
    const int64_t count = std::min(kMostInner, v.size(2) - t);
    const at::Tensor sum = at::matmul(p.narrow(-1, t, count), v.narrow(2, t, count));
    out = out.defined() ? out + sum : sum;
  }
  return out;
}

}  // namespace

at::Tensor visible(const at::Tensor& t, const at::Tensor& own, int64_t window, bool causal) {
  const at::Tensor after = t > own - (window > 0 ? window : kMaxK);
  return causal ? after & (t <= own) : after;
}

at::Tensor attention(const args::attention& o, const at::Tensor& keys, const at::Tensor& values) {
  const at::Tensor& q = o.q;
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), dim = q.size(3);
  const int64_t kv_heads = keys.size(1), group = heads / kv_heads;
  const int64_t slots = o.mask.has_value() ? std::min(keys.size(2), o.mask->size(3)) : keys.size(2);
  if (slots == 0) {  // zeros made of the queries, so that a gradient reaches them
    return stored(q.transpose(1, 2), q.scalar_type())
        .masked_fill(at::ones({}, q.options().dtype(at::kBool)), 0);
  }
  const at::Tensor length = o.length.has_value()
                                ? o.length->clamp(0, slots)  // as shaders take it
                                : at::full({}, slots, q.options().dtype(at::kLong));
  const at::Tensor t = at::arange(slots, length.options());
  const at::Tensor own = (at::arange(queries, length.options()) + (length - queries)).unsqueeze(1);
  const at::Tensor k = keys.narrow(2, 0, slots).to(at::kFloat);
  const at::Tensor seen = visible(t, own, window_of(o), o.causal) & (t < length);
  const at::Tensor held = (t < length).unsqueeze(-1);
  const at::Tensor v0 = values.narrow(2, 0, slots).to(at::kFloat);
  const at::Tensor v = at::where(held, v0, at::zeros_like(v0));  // nobody wrote the others
  const at::Tensor rows = q.to(at::kFloat).reshape({batch, kv_heads, group * queries, dim});
  at::Tensor s = scores(rows, k) * scale_of(o);
  s = s.view({batch, heads, queries, slots});
  if (o.softcap > 0) s = (s / o.softcap).tanh() * o.softcap;
  at::Tensor open = seen;
  if (o.mask.has_value()) {
    const at::Tensor mask = o.mask->narrow(3, 0, slots);
    if (mask.scalar_type() == at::kBool) {
      open = open & mask;
    } else {
      s = s + mask.to(at::kFloat);
    }
  }
  s = at::where(open, s, at::full({}, kNothing, s.options()));
  at::Tensor top = s.detach().amax(-1, true), sinks;
  if (o.sinks.has_value()) {
    sinks = o.sinks->to(at::kFloat).view({1, heads, 1, 1});
    top = at::maximum(top, sinks.detach());
  }
  top = at::where(top == kNothing, at::zeros_like(top), top);
  const at::Tensor p = (s - top).exp();
  at::Tensor total = p.sum(-1, true);
  if (sinks.defined()) total = total + (sinks - top).exp();
  const at::Tensor sum = weighted(p.reshape({batch, kv_heads, group * queries, slots}), v);
  const at::Tensor y =
      sum.view({batch, heads, queries, dim}) / at::where(total == 0, at::ones_like(total), total);
  return stored(y.transpose(1, 2), q.scalar_type());
}

at::Tensor quantize(const at::Tensor& x, const Format& format) {
  const auto by_blocks = [&](at::Tensor (*encode)(const at::Tensor&)) {
    const at::Tensor blocks = x.reshape({-1, format.block_values});
    return encode(blocks).reshape({x.size(0), -1});
  };
  if (format.codec == Codec::Q8_0) return by_blocks(q8_0);
  if (format.codec == Codec::Q4_0) return by_blocks(q4_0);
  return {};
}

}  // namespace metalmm::composed
