// The recurrent ops of torch's own ops, for gradients: a chunk of positions at a time, so that what
// autograd keeps grows with the positions and not with their square.
#include <algorithm>
#include <cmath>
#include <vector>

#include "composed.h"
#include "recurrent.h"
#include "tensors.h"

namespace metalmm::composed {
namespace {

constexpr int64_t kChunk = 64;  // positions

at::Tensor f32(const at::Tensor& t) { return t.to(at::kFloat); }

// The state becomes `after`, which has no gradient: what reads it later is not this graph's.
void keep(const at::Tensor& state, const at::Tensor& after) {
  at::Tensor(state).copy_(after.detach());
}

// Heads [B, S, heads, n] -> [B, heads, S, n].
at::Tensor by_head(const at::Tensor& t) { return f32(t).transpose(1, 2); }

// e^(sum of rates behind position j up to i) [..., i, j] of their running sums; 0 before j.
at::Tensor decays(const at::Tensor& sums) {
  const at::Tensor between = sums.unsqueeze(-1) - sums.unsqueeze(-2);
  const at::Tensor later = at::ones_like(between, at::kBool).triu(1);
  return between.masked_fill(later, -INFINITY).exp();
}

// f(first, count) of each chunk, its results [B, heads, count, n] as [B, S, heads, n].
template <class F>
at::Tensor of_chunks(int64_t positions, F f) {
  std::vector<at::Tensor> out;
  for (int64_t first = 0; first < positions; first += kChunk) {
    out.push_back(f(first, std::min(kChunk, positions - first)));
  }
  return at::cat(out, 2).transpose(1, 2).contiguous();
}

at::Tensor repeated(const at::Tensor& heads, int64_t times) {
  return heads.repeat_interleave(times, 1);
}

}  // namespace

at::Tensor causal_conv(const args::causal_conv& a) {
  const int64_t positions = a.x.size(1), channels = a.x.size(2), taps = a.weight.size(1);
  const int64_t width = a.state.size(2);
  const at::Tensor rows = at::cat({a.state, a.x.transpose(1, 2)}, 2);  // [B, C, width + S]
  const OptionalTensor bias = a.bias.has_value() ? OptionalTensor(f32(*a.bias)) : std::nullopt;
  const at::Tensor read = f32(rows.narrow(2, width - taps + 1, taps - 1 + positions));
  const int64_t one[] = {1}, none[] = {0};
  const at::Tensor y = at::conv1d(read, f32(a.weight).unsqueeze(1), bias, one, none, one, channels);
  keep(a.state, rows.narrow(2, positions, width));
  const at::Tensor by_row = y.transpose(1, 2).contiguous();
  return stored(a.activation.has_value() ? at::silu(by_row) : by_row, a.x.scalar_type());
}

// Chunks as in Yang et al. (arXiv:2412.06464): with the decays D and G_i = D from the chunk's
// beginning, k_i v_i'^T is what position i adds to the state, where
//     (1 + tril(beta k k^T D, -1)) v' = beta v - beta G k S,
//     y = G q S + tril(q k^T D) v',   S = G_last S + (D_last k)^T v'.
at::Tensor gated_delta(const args::gated_delta& a) {
  const int64_t heads = a.state.size(1), dk = a.state.size(2), dv = a.state.size(3);
  const int64_t keys = (a.qkv.size(2) - heads * dv) / 2, group = heads * dk / keys;
  const auto parts = a.qkv.split_with_sizes({keys, keys, heads * dv}, -1);
  const auto unit = [&](const at::Tensor& part) {
    const at::Tensor t = by_head(part.unflatten(-1, {keys / dk, dk}));
    return repeated(t * (t.square().sum(-1, true) + a.eps).rsqrt(), group);
  };
  const at::Tensor q = unit(parts[0]) * std::pow(dk, -0.5), k = unit(parts[1]);
  const at::Tensor v = by_head(parts[2].unflatten(-1, {heads, dv}));
  const at::Tensor gate = at::softplus(f32(a.a) + f32(a.dt_bias));
  const at::Tensor rate = (gate * -f32(a.a_log).exp()).transpose(1, 2);  // [B, heads, S]
  const at::Tensor beta = f32(a.b).sigmoid().transpose(1, 2).unsqueeze(-1);
  at::Tensor state = a.state.clone();
  const at::Tensor y = of_chunks(a.qkv.size(1), [&](int64_t first, int64_t count) {
    const auto chunk = [&](const at::Tensor& t) { return t.narrow(2, first, count); };
    const at::Tensor sums = chunk(rate).cumsum(-1), decay = decays(sums);
    const at::Tensor from_start = sums.exp().unsqueeze(-1);
    const at::Tensor qs = chunk(q), ks = chunk(k), betas = chunk(beta), keys_t = ks.mT();
    const at::Tensor unlike = (betas * ks.matmul(keys_t) * decay).tril(-1);
    const at::Tensor given = betas * (chunk(v) - from_start * ks.matmul(state));
    const at::Tensor added = at::linalg_solve_triangular(unlike + at::eye(count, unlike.options()),
                                                         given, false, true, true);
    const at::Tensor out =
        from_start * qs.matmul(state) + (qs.matmul(keys_t) * decay).matmul(added);
    const at::Tensor to_end = decay.select(-2, count - 1).unsqueeze(-1);
    state = from_start.narrow(2, count - 1, 1) * state + (to_end * ks).mT().matmul(added);
    return out;
  });
  keep(a.state, state);
  return stored(y, a.qkv.scalar_type());
}

// Chunks as in Dao and Gu (arXiv:2405.21060): y = (c b^T D) t x + G c S + d x, S = G_last S +
// (D_last t x)^T b.
at::Tensor ssm_scan(const args::ssm_scan& a) {
  const int64_t heads = a.state.size(1), p = a.state.size(2), n = a.state.size(3);
  const int64_t shared = (a.xbc.size(2) - heads * p) / 2, group = heads * n / shared;
  const auto parts = a.xbc.split_with_sizes({heads * p, shared, shared}, -1);
  const at::Tensor x = by_head(parts[0].unflatten(-1, {heads, p}));
  const at::Tensor b = repeated(by_head(parts[1].unflatten(-1, {shared / n, n})), group);
  const at::Tensor c = repeated(by_head(parts[2].unflatten(-1, {shared / n, n})), group);
  at::Tensor t = at::softplus(f32(a.dt) + f32(a.dt_bias)).clamp_min(a.dt_min);
  if (a.dt_max.has_value()) t = t.clamp_max(*a.dt_max);
  const at::Tensor rate = (t * -f32(a.a_log).exp()).transpose(1, 2);  // [B, heads, S]
  const at::Tensor scaled = x * t.transpose(1, 2).unsqueeze(-1);
  at::Tensor state = a.state.clone();
  at::Tensor y = of_chunks(a.xbc.size(1), [&](int64_t first, int64_t count) {
    const auto chunk = [&](const at::Tensor& part) { return part.narrow(2, first, count); };
    const at::Tensor sums = chunk(rate).cumsum(-1), decay = decays(sums);
    const at::Tensor from_start = sums.exp().unsqueeze(-1), added = chunk(scaled);
    const at::Tensor out = (chunk(c).matmul(chunk(b).mT()) * decay).matmul(added) +
                           from_start * chunk(c).matmul(state.mT());
    const at::Tensor to_end = decay.select(-2, count - 1).unsqueeze(-1);
    state = from_start.narrow(2, count - 1, 1) * state + (to_end * added).mT().matmul(chunk(b));
    return out;
  });
  y = (y + x.transpose(1, 2) * f32(a.d).unsqueeze(-1)).flatten(2);
  keep(a.state, state);
  return stored(a.gate.has_value() ? y * at::silu(f32(*a.gate)) : y, a.xbc.scalar_type());
}

}  // namespace metalmm::composed
