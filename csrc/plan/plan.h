// Which kernels compute a problem on a GPU, decided as values: a pure function of the problem, the
// machine and, if wanted, the strategy. No torch, no Metal, nothing read from this machine.
//
//   y[M, N] = alpha * x[M, K] W[N, K]^T + bias[N] + beta * c[M, N]
#pragma once

#include <cstdint>
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
#include "metal/strategies.def"
  kCount
};
constexpr int kNumStrategies = static_cast<int>(StrategyId::kCount);

enum class DType : int {
#define MM_DTYPE(name, Enumerator, ...) Enumerator,
#include "dtypes.def"
  kCount
};
constexpr int kNumDTypes = static_cast<int>(DType::kCount);

constexpr int64_t dtype_bytes(DType d) {
  constexpr int64_t kBytes[] = {
#define MM_DTYPE(name, Enumerator, bytes, ...) bytes,
#include "dtypes.def"
  };
  return kBytes[static_cast<int>(d)];
}

// What is asked for. Beside each: the sizes it reads.
enum class Op : int {
  kLinear,      // m, n, k
  kSwigluUp,    // m, n, k: y = silu(x W^T) * (x W2^T), W and W2 of the same format
  kSwigluDown,  // m, n, k: y = (silu(x) * x2) W^T
  kEmbedding,   // m ids, k values a row; n rows in the table
  kDequantize,  // n, k
  kAdd,         // n elements: y = x + x2
  kSub,
  kMul,
  kDiv,
  kDot,      // k elements: y[0] = sum of x * x2
  kSiluMul,  // n elements: y = silu(x) * x2, x and x2 f32
  kCount
};

constexpr bool has_weight(Op op) { return op < Op::kAdd; }

constexpr int64_t kPacked = -1;  // a stride: rows follow each other

struct Problem {
  Op op = Op::kLinear;
  int64_t m = 1, n = 1, k = 1;
  const Format* format = nullptr;  // of weight; not read without one
  DType dtype = DType::kF16;       // of x, y, bias and c; of silu_mul: y
  // Distance of rows: elements of x (and x2) and of y (and c), bytes of weights.
  int64_t x_stride = kPacked, y_stride = kPacked, w_stride = kPacked, w2_stride = kPacked;
  // Bytes that the address of the first value is a multiple of: x and x2, both weights.
  int64_t x_alignment = 16, w_alignment = 16;
  bool has_bias = false, has_c = false;
  float alpha = 1, beta = 0;  // c is not read when beta is 0
  // linear without bias, c and alpha: y is f32 [M, N], not rounded to dtype.
  bool y_f32 = false;
};

// Passes for the problem, the table's choice or the strategy named. Forcing split_reduce forces
// split-K: the table's strategy in two parts or more, in one where K has no second. Empty when
// there is no output. Throws std::invalid_argument, before any work, that names the argument or the
// strategy, what was given and what is allowed.
Plan plan(const Problem& problem, const Gpu& gpu,
          std::optional<StrategyId> strategy = std::nullopt);

// Whether the SwiGLU halves pay at M rows of x: their kernels decode W once per row, so that beyond
// a few rows linears and silu_mul, with a result in f32 between them, are faster. plan() runs what
// it is asked; the caller asks.
bool is_fused(Op op, int64_t m);

const char* to_string(StrategyId s);
const char* to_string(DType d);
const char* to_string(Op op);

// Name to value. Throw std::invalid_argument that lists the names.
StrategyId strategy_by_name(std::string_view name);
DType dtype_by_name(std::string_view name);
Op op_by_name(std::string_view name);

// The strategies that can be forced for an op.
std::vector<StrategyId> strategies_of(Op op);

// The name of the function in the shader library; an alias has none of its own.
std::string kernel_name(StrategyId strategy, Codec codec, DType dtype);

// Every function of the library: strategies.def times formats.def times the dtypes.
std::vector<std::string> all_kernel_names();

}  // namespace metalmm
