// The recurrent ops, in f32; heads are shared among threads.
#include "ops/recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "ops/attention/memory.h"
#include "ops/tensors.h"

namespace metalmm::cpu {
namespace {

at::Tensor dense_f32(const at::Tensor& t) { return t.to(at::kFloat).contiguous(); }

float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// x / sqrt(sum of squares + eps) * scale
void normalise(const float* x, int64_t n, float eps, float scale, float* out) {
  float squares = eps;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const float factor = scale / std::sqrt(squares);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

// Columns of a state that stay in a first-level cache between two walks: 32 KB of 128 rows.
constexpr int64_t kColumns = 64;

// A step of `count` columns of a state [dk, dv] of a head.
void step(const float* q, const float* k, const float* v, float decay, float beta, float* state,
          int64_t dk, int64_t dv, int64_t count, float* y) {
  float delta[kColumns] = {}, out[kColumns] = {};
  for (int64_t i = 0; i < dk; ++i) {
    float* row = state + i * dv;
    for (int64_t c = 0; c < count; ++c) {
      row[c] *= decay;
      delta[c] += row[c] * k[i];
    }
  }
  for (int64_t c = 0; c < count; ++c) delta[c] = (v[c] - delta[c]) * beta;
  for (int64_t i = 0; i < dk; ++i) {
    float* row = state + i * dv;
    for (int64_t c = 0; c < count; ++c) {
      row[c] += k[i] * delta[c];
      out[c] += row[c] * q[i];
    }
  }
  std::copy(out, out + count, y);
}

// A step of a state [p, n] of a head.
void scan(const float* x, const float* b, const float* c, float dt, float decay, float d,
          float* state, int64_t p, int64_t n, float* y) {
  constexpr int64_t kLanes = 16;  // sums side by side, which no compiler may make of one
  for (int64_t i = 0; i < p; ++i, state += n) {
    const float scaled = dt * x[i];
    float sums[kLanes] = {}, out = d * x[i];
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        state[j + l] = state[j + l] * decay + scaled * b[j + l];
        sums[l] += state[j + l] * c[j + l];
      }
    }
    for (; j < n; ++j) {
      state[j] = state[j] * decay + scaled * b[j];
      sums[j % kLanes] += state[j] * c[j];
    }
    for (const float sum : sums) out += sum;
    y[i] = out;
  }
}

// Rows y = act(bias + sum over taps of weight[taps, n] x); x begins taps - 1 rows before what the
// first row of y is of.
void convolve(const float* x, const float* weight, const float* bias, bool silu, int64_t rows,
              int64_t taps, int64_t n, float* y) {
  for (int64_t s = 0; s < rows; ++s, y += n, x += n) {
    for (int64_t c = 0; c < n; ++c) y[c] = bias ? bias[c] : 0;
    for (int64_t j = 0; j < taps; ++j) {
      for (int64_t c = 0; c < n; ++c) y[c] += weight[j * n + c] * x[j * n + c];
    }
    if (silu) {
      for (int64_t c = 0; c < n; ++c) y[c] /= 1 + std::exp(-y[c]);
    }
  }
}

}  // namespace

at::Tensor causal_conv(const args::causal_conv& a) {
  check(a);
  check_written(a);
  const int64_t batch = a.x.size(0), positions = a.x.size(1), n = a.x.size(2);
  const int64_t taps = a.weight.size(1), width = a.state.size(2);
  at::Tensor y = at::empty({batch, positions, n}, a.x.options().dtype(at::kFloat));
  if (y.numel() == 0) return y.to(a.x.scalar_type());
  const at::Tensor rows = at::cat({a.state.transpose(1, 2), a.x}, 1);  // [B, width + S, C]
  at::Tensor(a.state).copy_(rows.narrow(1, positions, width).transpose(1, 2));
  const at::Tensor x = dense_f32(rows), weight = dense_f32(a.weight.t());
  const at::Tensor bias = a.bias.has_value() ? dense_f32(*a.bias) : at::Tensor();
  const float *from = elements<float>(x), *weights = elements<float>(weight);
  const float* biases = bias.defined() ? elements<float>(bias) : nullptr;
  float* to = y.mutable_data_ptr<float>();
  constexpr int64_t kRows = 16;  // positions of a sequence, for a thread at a time
  const int64_t parts = ceil_div(positions, kRows);
  parallel_for(0, batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / parts, first = item % parts * kRows;
      convolve(from + (b * (width + positions) + width - taps + 1 + first) * n, weights, biases,
               a.activation.has_value(), std::min(kRows, positions - first), taps, n,
               to + (b * positions + first) * n);
    }
  });
  return y.to(a.x.scalar_type());
}

at::Tensor gated_delta(const args::gated_delta& a) {
  const DeltaShape shape = check(a);
  check_written(a);
  const int64_t batch = a.qkv.size(0), positions = a.qkv.size(1), values = a.qkv.size(2);
  const int64_t heads = a.state.size(1), dk = a.state.size(2), dv = a.state.size(3);
  const int64_t key_heads = shape.key_heads.expect_int(), group = heads / key_heads;
  const at::Tensor x = dense_f32(a.qkv), as = dense_f32(a.a), bs = dense_f32(a.b);
  const at::Tensor logs = dense_f32(a.a_log), biases = dense_f32(a.dt_bias);
  const at::Tensor state = a.state.contiguous();
  at::Tensor y = at::empty({batch, positions, heads, dv}, x.options());
  const float *of_x = elements<float>(x), *of_a = elements<float>(as), *of_b = elements<float>(bs);
  const float *log = elements<float>(logs), *bias = elements<float>(biases);
  float *to = y.mutable_data_ptr<float>(), *states = state.mutable_data_ptr<float>();
  const auto eps = static_cast<float>(a.eps), scale = 1 / std::sqrt(static_cast<float>(dk));
  parallel_for(0, batch * heads, 1, [&](int64_t first, int64_t last) {
    std::vector<float> q(dk), k(dk);
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item % heads, key = head / group;
      const float rate = std::exp(log[head]);
      for (int64_t s = 0; s < positions; ++s) {
        const int64_t m = item / heads * positions + s, gate = m * heads + head;
        const float* row = of_x + m * values;
        normalise(row + key * dk, dk, eps, scale, q.data());
        normalise(row + (key_heads + key) * dk, dk, eps, 1, k.data());
        const float decay = std::exp(-rate * softplus(of_a[gate] + bias[head]));
        const float beta = 1 / (1 + std::exp(-of_b[gate]));
        const float* v = row + 2 * key_heads * dk + head * dv;
        for (int64_t c = 0; c < dv; c += kColumns) {
          step(q.data(), k.data(), v + c, decay, beta, states + item * dk * dv + c, dk, dv,
               std::min(kColumns, dv - c), to + gate * dv + c);
        }
      }
    }
  });
  if (!a.state.is_contiguous()) at::Tensor(a.state).copy_(state);
  return y.to(a.qkv.scalar_type());
}

at::Tensor ssm_scan(const args::ssm_scan& a) {
  const SsmShape shape = check(a);
  check_written(a);
  const int64_t batch = a.xbc.size(0), positions = a.xbc.size(1), values = a.xbc.size(2);
  const int64_t heads = a.state.size(1), p = a.state.size(2), n = a.state.size(3);
  const int64_t groups = shape.groups.expect_int();
  const at::Tensor x = dense_f32(a.xbc), dts = dense_f32(a.dt), logs = dense_f32(a.a_log);
  const at::Tensor biases = dense_f32(a.dt_bias), ds = dense_f32(a.d);
  const at::Tensor gates = a.gate.has_value() ? dense_f32(*a.gate) : at::Tensor();
  const at::Tensor state = a.state.contiguous();
  at::Tensor y = at::empty({batch, positions, heads * p}, x.options());
  const float *of_x = elements<float>(x), *of_dt = elements<float>(dts);
  const float *log = elements<float>(logs), *bias = elements<float>(biases);
  const float *d = elements<float>(ds), *gate = gates.defined() ? elements<float>(gates) : nullptr;
  float *to = y.mutable_data_ptr<float>(), *states = state.mutable_data_ptr<float>();
  const auto least = static_cast<float>(a.dt_min);
  const auto most = static_cast<float>(a.dt_max.value_or(INFINITY));
  parallel_for(0, batch * heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item % heads, group = head / (heads / groups);
      const float rate = std::exp(log[head]);
      for (int64_t s = 0; s < positions; ++s) {
        const int64_t m = item / heads * positions + s, at = (m * heads + head) * p;
        const float *row = of_x + m * values, *b = row + heads * p + group * n;
        const float open = softplus(of_dt[m * heads + head] + bias[head]);
        const float dt = std::min(std::max(open, least), most);
        scan(row + head * p, b, b + groups * n, dt, std::exp(-rate * dt), d[head],
             states + item * p * n, p, n, to + at);
        for (int64_t i = at; gate && i < at + p; ++i) to[i] *= gate[i] / (1 + std::exp(-gate[i]));
      }
    }
  });
  if (!a.state.is_contiguous()) at::Tensor(a.state).copy_(state);
  return y.to(a.xbc.scalar_type());
}

}  // namespace metalmm::cpu
