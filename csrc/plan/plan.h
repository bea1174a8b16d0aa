// The kernels that compute a problem on a GPU, decided as values: a pure function of the problem,
// the machine and, if wanted, the strategy. No torch, no Metal, nothing read from this machine.
//
//   y[M, N] = alpha * x[M, K] W[N, K]^T + bias[N] + beta * c[M, N], or * bias[N]
//
// x may be normalised: rsqrt(mean of x^2 + eps) * x * (offset + weight[K]).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format.h"
#include "gpu.h"
#include "launch.h"

namespace metalmm {

// The rows of metal/strategies.def.
enum class StrategyId : int {
#define MM_STRATEGY(name, ...) name,
#define MM_ALIAS(name, other) name,
#define MM_TORCH(name, passes) name,
#include "metal/strategies.def"
  kCount
};
constexpr int kNumStrategies = static_cast<int>(StrategyId::kCount);

enum class Op : int {
#define MM_SEVERAL(op, name) op,
#include "problems.def"
  kCount
};

constexpr bool is_of_experts(Op op) { return op >= Op::kExpertLinear && op <= Op::kExpertTiles; }
constexpr bool has_weight(Op op) { return op < Op::kAdd; }
// rms_norm and what follows: what takes rows of x and has no W.
constexpr bool is_of_rows(Op op) { return op >= Op::kRmsNorm; }

constexpr int64_t kPacked = -1;  // a stride: rows follow each other

#define MM_SIZES(Struct, name, fields) \
  struct Struct {                      \
    fields                             \
  };
#define MM_FIELD(type, name, value) type name = value;
#include "sizes.def"

struct Problem {
  Op op = Op::kLinear;
  int64_t m = 1, n = 1, k = 1;
  const Format* format = nullptr;  // format of weight; not read without one
  DType dtype = DType::kF16;       // x, y, bias, c, the weight of a norm; of act_mul: y
  // Distance of rows: elements of x, of x2 where it is not that of x, and of y (and c), bytes of
  // weights.
  int64_t x_stride = kPacked, x2_stride = kPacked, y_stride = kPacked;
  int64_t w_stride = kPacked, w2_stride = kPacked;
  // Bytes that the address of the first value is a multiple of: x, x2, the weight of a norm, and c
  // of rms_norm; both weights.
  int64_t x_alignment = 16, w_alignment = 16;
  bool has_bias = false, has_c = false;
  bool bias_multiplies = false;  // linear: before c is added
  // x of linear and of swiglu_up is normalised, by the vector strategies only; rms_norm and
  // add_rms_norm do nothing else.
  bool has_norm = false, has_norm_weight = false, has_gate = false;
  float eps = 0, offset = 0;
  int64_t norm_rows = 1;  // rows of the weight of rms_norm, by turns for the rows of x
  Activation activation = Activation::kSilu;
#define MM_SIZES(Struct, name, fields) Struct name;
#include "sizes.def"
  float alpha = 1, beta = 0;  // c is not read when beta is 0
  float softcap = 0;          // linear: y is softcap tanh(y / softcap), 0: as it is
  // linear and expert_tiles without bias, c, alpha and softcap: y is f32 [M, N], not rounded to
  // dtype.
  bool y_f32 = false;
  bool rounded = false;  // act_mul
  // linear, the halves of SwiGLU, attention: each of up to kBatchPerPass rows of x, or queries, has
  // the bits that it has alone.
  bool exact_rows = false;
  // embedding: its rows are multiplied, by a value of dtype or an f32, one for all or for each.
  bool has_scale = false, float_scale = false, row_scales = false;
};

// Passes for the problem, the table's choice or the strategy named. Forcing split_reduce forces
// split-K: the table's strategy in two parts or more, in one where K has no second. Empty when
// there is no output. Throws std::invalid_argument, before any work, that names the argument or the
// strategy, what was given and what is allowed.
// `reason`, where there is one, becomes why this strategy, in words.
Plan plan(const Problem& problem, const Gpu& gpu, std::optional<StrategyId> strategy = std::nullopt,
          std::string* reason = nullptr);

// Whether the SwiGLU halves pay at M rows of x: their kernels decode W once per row, so that beyond
// a few rows linears and act_mul, with a result in f32 between them, are faster. plan() runs what
// it is asked; the caller asks.
bool is_fused(Op op, int64_t m);

// Whether a shader quantizes rows of this format.
bool has_append(const Format& format);

// Whether linear normalises x as it multiplies it; if not, rms_norm is a pass before it. plan()
// runs what it is asked.
bool norm_is_fused(const Problem& problem, const Gpu& gpu);

// Whether rows by expert, in tiles, pay for `choices` of `experts`: what reads W of an expert for
// each row that chose it reads it several times.
bool experts_are_tiled(int64_t choices, int64_t experts);
// Rows of a tile.
int64_t expert_tile_rows(int64_t choices, int64_t experts);

// Whether there are kernels for heads of k values of a cache of this format.
bool has_attention(const Format& format, int64_t k);

// Whether kernels read and write keys and values of these formats where they do those of values
// alone: both are of one format, or keys are f16.
bool is_pair_of_kernels(const Format& keys, const Format& values);
// Whether the kernels of such a pair are those of values, told that keys are f16.
bool has_half_keys(const Format& keys, const Format& values);

const char* to_string(StrategyId s);
const char* to_string(Op op);

#define MM_NAME(value, name) #name,
constexpr const char* kActivations[] = {MM_ACTIVATIONS(MM_NAME)};  // names by Activation
#undef MM_NAME

// Name to value. Throw std::invalid_argument that lists the names.
StrategyId strategy_by_name(std::string_view name);
DType dtype_by_name(std::string_view name);
Op op_by_name(std::string_view name);
Activation activation_by_name(std::string_view name);

// The strategies that can be forced for an op.
std::vector<StrategyId> strategies_of(Op op);

// The name of the function in the shader library; an alias, or torch's matmul, has none of its own.
std::string kernel_name(StrategyId strategy, Codec codec, DType dtype);

// Every function of the library: strategies.def times formats.def times the dtypes.
std::vector<std::string> all_kernel_names();

}  // namespace metalmm
