// One function per format row of metal/formats.def: what quantize_row chooses from.
#pragma once

#include <cstdint>

#include "plan/format.h"

namespace metalmm::cpu::quant {

// out[0, k * bytes per value) = x[0, k) in the format's type, rounded to nearest even.
void quantize_f32(const float* x, int64_t k, uint8_t* out);
void quantize_f16(const float* x, int64_t k, uint8_t* out);
void quantize_bf16(const float* x, int64_t k, uint8_t* out);

// One block from 32 or 256 values, by the rules of the Python class of that name.
void quantize_q4_0(const float* x, uint8_t* out);
void quantize_q4_1(const float* x, uint8_t* out);
void quantize_q5_0(const float* x, uint8_t* out);
void quantize_q5_1(const float* x, uint8_t* out);
void quantize_q8_0(const float* x, uint8_t* out);
void quantize_mxfp4(const float* x, uint8_t* out);
void quantize_iq4_nl(const float* x, uint8_t* out);
void quantize_iq4_xs(const float* x, uint8_t* out);
void quantize_q2_k(const float* x, uint8_t* out);
void quantize_q3_k(const float* x, uint8_t* out);
void quantize_q4_k(const float* x, uint8_t* out);
void quantize_q5_k(const float* x, uint8_t* out);
void quantize_q6_k(const float* x, uint8_t* out);

// A whole row of f: codes | scales | biases | zeros.
template <int kBits>
void quantize_affine(const Format& f, const float* x, int64_t k, uint8_t* out);

}  // namespace metalmm::cpu::quant
