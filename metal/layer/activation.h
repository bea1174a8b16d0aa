// The functions of a gated MLP in f32, and the product that such a layer makes of one.
#pragma once

#include "../entry.h"

namespace metalmm {

METAL_FUNC float silu(float x) { return x / (1.0f + exp(-x)); }
METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + e^x). The logarithm of 1 + t, t up to 1, is 2 artanh(t / (2 + t)), whose series has
// positive terms: its relative error is below 6 2^-24 for the smallest t, too, where 1 + t is 1.
// (What is left out behind 8 terms is below 2^-29.)
METAL_FUNC float softplus(float x) {
  const float t = exp(-fabs(x)), s = t / (2.0f + t), s2 = s * s;
  float p = 1.0f / 15;
  MM_UNROLL
  for (int odd = 13; odd > 0; odd -= 2) p = fma(p, s2, 1.0f / float(odd));
  return max(x, 0.0f) + 2.0f * s * p;
}

// x (1 + tanh u) / 2 is x / (1 + exp(-2 u)).
METAL_FUNC float gelu_tanh(float x) {
  constexpr float kTwice = 1.59576912f, kCubed = 0.0713548163f;  // 2 sqrt(2 / pi), * 0.044715
  return x / (1.0f + exp(-x * fma(kCubed, x * x, kTwice)));
}

METAL_FUNC float relu2(float x) { return x <= 0.0f ? 0.0f : x * x; }  // NaN of NaN

// x Phi(x), of which Metal has no erf. The tail Phi(-|x|) is t exp(-x^2 / 2 + p(t)), t = 1 / (1 +
// |x| / 4), and not 1 less than another number: its relative error, and that of the result, is
// below (9 + x^2 / 2) 2^-24 beside the error of exp(). (p: minimax for |x| up to 14, from where on
// the tail is below 2^-126; 0.52 of the 9.)
METAL_FUNC float gelu(float x) {
  constexpr int kTerms = 10;
  constexpr float kP[kTerms] = {-2.305408f,  1.0031464f,  0.41451055f, 0.29319924f, -0.07303329f,
                                -0.0305174f, 0.51403064f, -1.0951807f, 0.76838166f, -0.1822763f};
  const float t = 1.0f / fma(0.25f, fabs(x), 1.0f);
  float p = kP[kTerms - 1];
  MM_UNROLL
  for (int i = kTerms - 2; i >= 0; --i) p = fma(p, t, kP[i]);
  const float tail = t * exp(fma(-0.5f * x, x, p));
  return x * (x > 0.0f ? 1.0f - tail : tail);
}

METAL_FUNC bool activation_is(Activation activation) {
  return fc_epilogue / kEpilogueActivation == uint(activation);
}

// act(gate) * up, of the pipeline's activation. One choice for all values: a choice for each takes
// more registers (ptxas, swiglu_down q4_k f16: 144, of which 28 bytes spill at 128; so 132, none).
#define MM_ACT_MUL(value, name)                                    \
  if (activation_is(Activation::value)) {                          \
    MM_UNROLL                                                      \
    for (int i = 0; i < kCount; ++i) v[i] = name(gate[i]) * up[i]; \
  } else
template <int kCount>
METAL_FUNC void act_mul(thread const float (&gate)[kCount], thread const float (&up)[kCount],
                        thread float* v) {
  MM_ACTIVATIONS(MM_ACT_MUL) {}
}

struct ActMul {
  static METAL_FUNC float of(float gate, float up) {
    const float gates[1] = {gate}, ups[1] = {up};
    float v[1];
    act_mul(gates, ups, v);
    return v[0];
  }
};

}  // namespace metalmm
