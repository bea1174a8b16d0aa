// Checks that a problem can be planned.

#include "metal/geometry.h"
#include "passes.h"

namespace metalmm {
namespace {

constexpr int64_t kMaxStride = int64_t{1} << 56;  // in bytes, it still fits 64 bits

void check_weights(const Problem& p) {
  const char* op = to_string(p.op);
  if (!p.format) reject("format: ", op, " needs one");
  if (p.k % p.format->block_values) {
    reject("k: ", p.k, " is not a multiple of the ", p.format->block_values,
           " values of a block of ", p.format->name);
  }
  // Where k itself does not fit, check_sizes() refuses it.
  if (p.k <= UINT32_MAX && p.format->row_bytes(p.k) > UINT32_MAX) {
    reject("k: ", p.k, " values of ", p.format->name, " are ", p.format->row_bytes(p.k),
           " bytes; shaders count the bytes of a row in 32 bits, at most ", UINT32_MAX);
  }
  const int64_t alignment = p.format->alignment;
  const bool strides_fit = p.n <= 1 || ((p.w_stride == kPacked || p.w_stride % alignment == 0) &&
                                        (p.w2_stride == kPacked || p.w2_stride % alignment == 0));
  if (p.w_alignment % alignment || !strides_fit) {
    reject("weight: rows of ", p.format->name, " begin at multiples of ", alignment,
           " bytes; alignment ", p.w_alignment, ", stride ", p.w_stride);
  }
}

void check_rope(const Problem& p) {
  const RopeSizes& r = p.rope;
  if (r.heads < 0 || r.kv_heads < 0) {
    reject("heads: ", r.heads, " of q, ", r.kv_heads, " of k; none may be negative");
  }
  if (r.rotated < 0 || r.rotated % 2 || r.rotated > p.k) {
    reject("rotated: ", r.rotated, "; must be even, 0 to the ", p.k, " values of a head");
  }
  if (r.positions < 1 || p.m % r.positions) {
    reject("positions: ", r.positions, "; must divide the ", p.m, " rows of x");
  }
  if (p.m && r.angle_rows != p.m && r.angle_rows != r.positions) {
    reject("angle_rows: ", r.angle_rows, "; must be ", r.positions, " or ", p.m);
  }
}

void check_tables(const Problem& p) {
  const TableSizes& t = p.tables;
  if (t.rows < 1 || (t.rows > 1 && !t.axes)) {
    reject("rows: ", t.rows, "; must be 1, or more with axes");
  }
  if (t.interleaved && !t.twice) reject("interleaved: only where twice");
}

}  // namespace

void check(const Problem& p) {
  const char* op = to_string(p.op);
  if (p.m < 0 || p.n < 0 || p.k < 0) {
    reject("shape: M, N, K = ", p.m, ", ", p.n, ", ", p.k, "; none may be negative");
  }
  for (int64_t stride :
       {p.x_stride, p.x2_stride, p.y_stride, p.w_stride, p.w2_stride, p.append.head_stride,
        p.append.sequence_stride, p.append.head2_stride, p.append.sequence2_stride,
        p.append.x_head_stride, p.append.x_sequence_stride, p.append.x2_head_stride,
        p.append.x2_sequence_stride}) {
    if (stride < kPacked || stride > kMaxStride) {
      reject("stride: ", stride, "; must be 0 to ", kMaxStride, ", or ", kPacked,
             " for rows that follow each other");
    }
  }
  const bool has_epilogue = p.op == Op::kLinear || p.op == Op::kSwigluDown;
  const bool has_bias = has_epilogue || (is_of_experts(p.op) && p.op != Op::kExpertTiles);
  const bool is_norm = p.op == Op::kRmsNorm || p.op == Op::kAddRmsNorm;
  const bool has_factor = p.op == Op::kRoute || p.op == Op::kRopeTables || p.op == Op::kSwigluUp;
  const bool has_c = p.op == Op::kRmsNorm || p.op == Op::kExpertDown;
  if ((!has_bias && p.has_bias) ||
      (!has_epilogue && ((p.alpha != 1 && !has_factor) || (p.has_c && !has_c)))) {
    reject("bias, c, alpha: ", op,
           " has none; linear and swiglu_down have, rms_norm and expert_down have c, experts have "
           "bias, but not in tiles; route, rope_tables and swiglu_up have alpha");
  }
  if ((p.has_scale || p.float_scale || p.row_scales) && p.op != Op::kEmbedding) {
    reject("scale: of embedding, not of ", op);
  }
  if (p.has_gate && p.op != Op::kRmsNorm && p.op != Op::kSsmScan) {
    reject("gate: of rms_norm and of ssm_scan, not of ", op);
  }
  if (p.norm_rows != 1 && (p.op != Op::kRmsNorm || p.norm_rows < 1)) {
    reject("norm_rows: ", p.norm_rows, "; must be 1, of rms_norm 1 or more");
  }
  if (p.rounded && p.op != Op::kActMul) reject("rounded: of act_mul, not of ", op);
  if (p.op == Op::kHadamard && p.n % kHadamardValues != 0) {
    reject("n: ", p.n, "; hadamard takes a multiple of ", kHadamardValues);
  }
  if (p.bias_multiplies && (p.op != Op::kLinear || !p.has_bias)) {
    reject("bias_multiplies: of linear with a bias, not of ", op);
  }
  if (p.softcap != 0 && p.op != Op::kLinear) reject("softcap: of linear, not of ", op);
  if (p.beta != 0 && !p.has_c) reject("c: missing, but beta is not 0");
  if (p.op == Op::kExpertDown && p.has_c && p.beta != 1) {
    reject("beta: ", std::to_string(p.beta), "; expert_down adds c as it is: 1");
  }
  if (p.has_norm && p.op != Op::kLinear && p.op != Op::kSwigluUp) {
    reject("norm: of x of linear and swiglu_up, not of ", op);
  }
  if (p.has_norm_weight && !p.has_norm && !is_norm) reject("norm: a weight, but no norm");
  if (p.y_f32 && ((p.op != Op::kLinear && p.op != Op::kExpertTiles) || p.has_bias || p.has_c ||
                  p.alpha != 1 || p.softcap != 0)) {
    reject("y_f32: only of linear and expert_tiles without bias, c, alpha and softcap");
  }
  if (p.y_f32 && p.y_stride != kPacked && p.y_stride != p.n) {
    reject("y_f32: rows of y follow each other; y_stride ", p.y_stride);
  }
  if (is_of_rows(p.op) && p.k > INT32_MAX) {  // a step beyond k still fits 32 bits
    reject("k: ", p.k, "; ", op, " takes at most ", INT32_MAX);
  }
  if (p.op == Op::kRopeTables) check_tables(p);
  if (p.op == Op::kRope || p.op == Op::kRopeAppend) check_rope(p);
  if (has_weight(p.op)) check_weights(p);
  if (is_of_experts(p.op)) check_experts(p);
  if (p.op == Op::kRopeAppend) check_append(p);
  if (p.op == Op::kAttention) check_attention(p);
  if (p.op == Op::kRoute) check_route(p);
  if (p.op == Op::kCausalConv) check_conv(p);
  if (p.op == Op::kGatedDelta) check_delta(p);
  if (p.op == Op::kSsmScan) check_ssm(p);
}

}  // namespace metalmm
