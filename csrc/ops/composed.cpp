#include "composed.h"

#include <cmath>
#include <vector>

#include "exact_rows.h"
#include "metal/geometry.h"
#include "tensors.h"

namespace metalmm::composed {
namespace {

// gelu_tanh(x) = x / 2 (1 + tanh(a (x + b x^3)))
const double kTanhScale = std::sqrt(2 / M_PI), kTanhCube = 0.044715;

// Values [..., D] of heads, the first R of them rotated by cos and sin [B or 1, S, 1, R].
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool interleaved) {
  const int64_t rotated = cos.size(-1);
  if (rotated == 0) return x;
  const at::Tensor head = x.narrow(-1, 0, rotated);
  at::Tensor turned;
  if (interleaved) {
    const auto pairs = head.unflatten(-1, {rotated / 2, 2}).unbind(-1);
    turned = at::stack({-pairs[1], pairs[0]}, -1).flatten(-2);
  } else {
    const auto halves = head.chunk(2, -1);
    turned = at::cat({-halves[1], halves[0]}, -1);
  }
  const at::Tensor out = head * cos + turned * sin;
  const int64_t rest = x.size(-1) - rotated;
  return rest ? at::cat({out, x.narrow(-1, rotated, rest)}, -1) : out;
}

at::Tensor activated(const at::Tensor& gate, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(gate);
    case Activation::kGelu:
      return at::gelu(gate);
    case Activation::kGeluTanh:
      return at::gelu(gate, "tanh");
    case Activation::kSigmoid:
      return at::sigmoid(gate);
    case Activation::kRelu2:
      break;
  }
  return at::relu(gate).square();
}

// torch computes vectors of 32 values and more, up to 32768 values by a thread, and what is left
// over one by one, with other bits.
constexpr int64_t kVectorValues = 64, kValuesOfThread = 32768;

// f(x), of rows that are to be exact one by one.
template <class Function>
at::Tensor by_rows(const at::Tensor& x, const Function& f) {
  if (!exact_rows() || !x.is_cpu()) return f(x);
  const int64_t columns = x.dim() ? x.size(-1) : 1;
  const int64_t count = columns ? x.numel() / columns : 0;
  const bool may_differ = columns % kVectorValues || x.numel() > kValuesOfThread;
  if (!may_differ || !are_exact(count)) return f(x);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& row : x.reshape({-1, columns}).split(1)) rows.push_back(f(row));
  return at::cat(rows).view(x.sizes());
}

}  // namespace

at::Tensor activate(const at::Tensor& gate, Activation activation) {
  return by_rows(gate, [=](const at::Tensor& rows) { return activated(rows, activation); });
}

at::Tensor soft_cap(const at::Tensor& y, double cap) {
  return by_rows(y, [=](const at::Tensor& rows) { return (rows / cap).tanh() * cap; });
}

at::Tensor slope(const at::Tensor& gate, Activation activation) {
  switch (activation) {
    case Activation::kSilu: {
      const at::Tensor s = gate.sigmoid();
      return s * (1 + gate * (1 - s));
    }
    case Activation::kGelu: {
      const at::Tensor density = (gate.square() * -0.5).exp() * (M_SQRT1_2 * M_2_SQRTPI / 2);
      return (1 + (gate * M_SQRT1_2).erf()) * 0.5 + gate * density;
    }
    case Activation::kGeluTanh: {
      const at::Tensor t = (kTanhScale * (gate + kTanhCube * gate.pow(3))).tanh();
      const at::Tensor inner = kTanhScale * (1 + 3 * kTanhCube * gate.square());
      return 0.5 * (1 + t) + 0.5 * gate * (1 - t.square()) * inner;
    }
    case Activation::kSigmoid: {
      const at::Tensor s = gate.sigmoid();
      return s * (1 - s);
    }
    case Activation::kRelu2:
      break;
  }
  return 2 * at::relu(gate);
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, double offset) {
  const at::Tensor rows = x.to(at::kFloat);
  const at::Tensor scaled = rows * (rows.square().mean(-1, true) + eps).rsqrt();
  return weight.has_value() ? scaled * (weight->to(at::kFloat) + offset) : scaled;
}

at::Tensor hadamard(const at::Tensor& x) {
  at::Tensor y = x.to(at::kFloat).reshape({-1, 1, 1});
  for (int64_t step = 1; step < kHadamardValues; step *= 2) {
    const auto pair = y.view({-1, 2, step}).unbind(1);
    y = at::stack({pair[0] + pair[1], pair[0] - pair[1]}, 1);
  }
  return y.view(x.sizes()) * kHadamardScale;
}

Heads rope(const args::rope& a, bool has_whole_norms) {
  const int64_t all = a.heads + (a.v.has_value() ? 1 : 2) * a.kv_heads;
  const at::Tensor by_head = a.qkv.unflatten(-1, {all, a.qkv.size(-1) / all}).to(at::kFloat);
  const at::Tensor c = a.cos.to(at::kFloat).unsqueeze(2), s = a.sin.to(at::kFloat).unsqueeze(2);
  const auto finish = [&](const at::Tensor& t) {
    return stored(t.transpose(1, 2), a.qkv.scalar_type());
  };
  const auto turned = [&](int64_t first, int64_t count, const OptionalTensor& norm) {
    at::Tensor part = by_head.narrow(2, first, count);
    if (norm.has_value()) {
      if (has_whole_norms) part = part.flatten(2);
      part = rms_norm(part, norm, a.eps, a.offset);
      if (has_whole_norms) part = part.unflatten(2, {count, by_head.size(-1)});
    }
    return finish(rotate(part, c, s, a.interleaved));
  };
  at::Tensor values = a.v.has_value() ? a.v->unflatten(-1, {a.kv_heads, by_head.size(-1)})
                                      : by_head.narrow(2, a.heads + a.kv_heads, a.kv_heads);
  if (a.v_norm) values = rms_norm(values, std::nullopt, a.eps, 0);
  return {turned(0, a.heads, a.q_norm), turned(a.heads, a.kv_heads, a.k_norm), finish(values)};
}

}  // namespace metalmm::composed
