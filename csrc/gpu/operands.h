// The operands of a call as a Problem and its Buffers, for the ops of this room.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <string>

#include "ops.h"
#include "ops/tensors.h"

namespace metalmm::gpu {

// Elements from a row to the next: torch's stride means nothing where a tensor has no elements or a
// single row.
int64_t row_stride(const at::Tensor& rows);

// The largest power of two, up to 16, that divides where t begins in memory.
int64_t alignment_of(const at::Tensor& t);

// The rows of W, copied where a view of theirs begins between the words that the shaders load.
at::Tensor aligned_rows(const PackedWeight& w);

// The memory from the first element of t to its last.
Buffer buffer_of(const at::Tensor& t);

// The dtype of a checked tensor.
DType dtype_of(at::ScalarType t);

// The operands of a problem by slot; a tensor that is not defined is absent.
class Operands {
 public:
  at::Tensor& operator[](Slot slot) { return tensors_.at(slot); }
  const at::Tensor& operator[](Slot slot) const { return tensors_.at(slot); }

 private:
  std::array<at::Tensor, kSlotPartial> tensors_;  // slots behind are the plan's own
};

// The message of the last launch that threw since the last call, or "". _take_failure() in Python,
// where runs that may fail for another reason hide it.
std::string take_failure();

// Plans p and launches the plan.
void launch(const Engine& e, const Problem& p, const Operands& o,
            std::optional<StrategyId> strategy = std::nullopt);

// Plans p, of which alignments, strides of weights and what is absent follow from the operands, and
// launches the plan.
void run(const Engine& e, Problem p, const Operands& o,
         std::optional<StrategyId> strategy = std::nullopt);

// An addend of the result, or the weight of a norm, in the dtype of the kernel; or none.
at::Tensor addend(const OptionalTensor& t, at::ScalarType dtype);

// A residual [..., N] as the rows of c, to which `p` gives the factor 1; or none.
at::Tensor residual_rows(const OptionalTensor& residual, at::ScalarType dtype, Problem& p);

// The kernels read what joins the result, and the weight of a norm, in the dtype of x. Another
// dtype would be rounded once too often: then all of them are f32, and the result is rounded.
at::ScalarType common_dtype(const at::Tensor& x, std::initializer_list<OptionalTensor> others);

// What an op takes of rows of x [M, K], and y = x W^T of them.
Problem problem(Op op, const at::Tensor& rows);
Problem problem(Op op, const at::Tensor& rows, const PackedWeight& w);

// The norm of rows of x.
struct Norm {
  const OptionalTensor& weight;
  double eps, offset;
};

// `rows` normalised, times silu(gate), + the residual, rounded to their dtype; a pass of its own.
at::Tensor normalised(const Engine& e, const at::Tensor& rows, const Norm& norm,
                      const OptionalTensor& residual = std::nullopt,
                      const OptionalTensor& gate = std::nullopt);

// Makes x of a product its norm: by the kernel that multiplies where that pays, else by a pass
// before.
void normalise(const Engine& e, Problem& p, Operands& o, const Norm& norm);

// x W^T [M, N] in f32 or in x's dtype, of the norm of x where one is given; x is multiplied in its
// own.
at::Tensor product(const Engine& e, const at::Tensor& rows, const PackedWeight& w,
                   at::ScalarType type, const Norm* norm = nullptr,
                   std::optional<StrategyId> strategy = std::nullopt);

// Whether torch's matmul computes the product and leaves halves, whatever it is stored as.
bool rounds_product(const Engine& e, const at::Tensor& rows, const PackedWeight& w);

}  // namespace metalmm::gpu
