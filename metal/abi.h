// What host and shaders agree on: arguments, buffer slots, function constants. Read by C++ and by
// MSL.
#pragma once

#if defined(__METAL_VERSION__)
#define MM_U32 uint
#define MM_I64 long
#else
#include <cstdint>
#define MM_U32 uint32_t
#define MM_I64 int64_t
#endif

namespace metalmm {

// One struct for every kernel; a kernel reads the fields its strategy needs. Strides are in
// elements for x, y and c, in bytes for weights. All sizes are of the whole problem, not of a tile.
struct KernelArgs {
  MM_I64 x_stride;   // row m of x, and of gate and up
  MM_I64 y_stride;   // row m of y and of c
  MM_I64 w_stride;   // row n of weight
  MM_I64 w2_stride;  // row n of weight2
  MM_U32 m, n, k;
  MM_U32 k_per_part;  // split-K: values of K per part, a whole number of blocks; k when there is
                      // one part
  MM_U32 parts;       // split-K: partial results per output, 1 when not split
  MM_U32 count;       // ids of an embedding, elements of silu_mul or a probe
  float alpha, beta;
};

// Buffer slots. A slot that a kernel does not declare stays unbound; one that it declares is bound
// to what bound() of csrc/plan/launch.h says, and not read where a function constant says absent.
enum Slot : MM_U32 {
  kSlotX = 0,       // activations; gate of swiglu_down and silu_mul
  kSlotWeight = 1,  // packed rows; gate weight of swiglu_up
  kSlotY = 2,       // result, or f32 sums (kEpiloguePartial)
  kSlotBias = 3,
  kSlotC = 4,
  kSlotWeight2 = 5,  // up weight of swiglu_up
  kSlotX2 = 6,       // up of swiglu_down and silu_mul; second operand of a probe
  kSlotIds = 7,      // int64
  kSlotPartial = 8,  // f32 partial results [parts, M, N] that the reduction pass reads
  kSlotArgs = 9,     // constant KernelArgs&
  kSlotCount = 10
};

constexpr MM_U32 slot_bit(Slot slot) { return MM_U32(1) << slot; }

// What the kernels of a family declare.
enum SlotBits : MM_U32 {
  kBindProbe = slot_bit(kSlotX) | slot_bit(kSlotX2) | slot_bit(kSlotY) | slot_bit(kSlotArgs),
  kBindEpilogue = slot_bit(kSlotY) | slot_bit(kSlotBias) | slot_bit(kSlotC) | slot_bit(kSlotArgs),
  kBindMatmul = kBindEpilogue | slot_bit(kSlotX) | slot_bit(kSlotWeight),
  kBindSwigluUp = kBindMatmul | slot_bit(kSlotWeight2),
  kBindSwigluDown = kBindMatmul | slot_bit(kSlotX2),
  kBindReduce = kBindEpilogue | slot_bit(kSlotPartial),
  kBindDequantize = slot_bit(kSlotWeight) | slot_bit(kSlotY) | slot_bit(kSlotArgs),
  kBindEmbedding = kBindDequantize | slot_bit(kSlotIds)
};

// Function constants: at most six. What removes a branch or fixes a stride.
enum FunctionConstant : MM_U32 {
  kConstantK = 0,      // uint: K, known at pipeline creation so that loops have a fixed trip count
  kConstantGroup = 1,  // uint: group size of an affine format, 0 otherwise
  kConstantScaleType = 2,  // uint: ScaleType of an affine format, 0 otherwise
  kConstantEpilogue = 3,   // uint: EpilogueBits
  kConstantBatch = 4,      // uint: rows of x per pass of gemv_batched and gemm_small, 0 otherwise
  kConstantBounds = 5,     // uint: BoundsBits
  kConstantCount = 6
};

// The type of the scales and the biases of an affine format.
enum class ScaleType : MM_U32 { kF16, kBF16, kF32 };

enum EpilogueBits : MM_U32 {
  kEpilogueBias = 1,
  kEpilogueC = 2,  // + beta * c
  kEpilogueAlpha = 4,
  kEpiloguePartial = 8  // y is f32 [parts, M, N], whatever x is; the other bits are zero
};

// The first three: that size has a tail. Alignment is that of the first byte and of the stride; a
// kernel that is not told of it loads element by element.
enum BoundsBits : MM_U32 {
  kBoundsN = 1,
  kBoundsM = 2,
  kBoundsK = 4,
  kBoundsAlignedX = 8,        // rows of x (and x2) are aligned to 16 bytes
  kBoundsAlignedWeight = 16,  // dense weights: rows are aligned to 16 bytes
  kBoundsPackedRows = 32,     // rows of W, and of W2, follow each other
  // Blocks of 2-byte fields (q4_0): rows begin and end at multiples of 4, of 8 bytes.
  kBoundsWordBlocks = 64,
  kBoundsLongBlocks = 128
};

}  // namespace metalmm
