// The interface of host and shaders: arguments, buffer slots, function constants. Read by C++ and
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
  MM_I64 x2_stride;  // row m of x2: of add_rms_norm, a gate, v of rope, a mask, a of gated_delta,
                     // dt of ssm_scan
  MM_I64 y_stride;   // row m of y and of c, of b of gated_delta, of a gate of ssm_scan; of route of
                     // c alone
  MM_I64 w_stride;   // row n of weight; slot of keys of a cache
  MM_I64 w2_stride;  // row n of weight2; slot of values of a cache
  // Strides of keys and (2) of values of a cache in bytes, of x and x2 of rope_append in values.
  // The mask of attention is x2: 0 repeats.
  // Bytes from an expert to the next: head_stride of weight, sequence_stride of weight2.
  MM_I64 head_stride, sequence_stride, head2_stride, sequence2_stride;
  MM_I64 x_head_stride, x_sequence_stride, x2_head_stride, x2_sequence_stride;
  MM_U32 m, n, k;     // k of rope and of attention: values of a head; gated_delta: k of q, n of v;
                      // ssm_scan: n of x, k of b and of c
  MM_U32 k_per_part;  // split-K: values of K per part, a whole number of blocks; k when there is
                      // one part; attention: pages of a cache
  MM_U32 parts;       // split-K: partial results per output, 1 when not split, 0 where y has them
  MM_U32 count;  // ids of an embedding, elements of hadamard, act_mul or a probe, rows of cos of
                 // rope, from a bias of gate of an expert to the next; attention: whether all n
                 // slots hold rows; causal_conv: inputs that the state holds
  // rope: heads of q, of k and of v; values of a head that are rotated; positions of a sequence.
  // attention: heads of q and of the cache, and queries of a sequence; m of all of them, n slots.
  // gated_delta: heads of v, and of q and k; it and causal_conv: positions of a sequence.
  // ssm_scan: heads of x, and of b and c; positions of a sequence; alpha and beta bound dt.
  // rope_tables: kv_heads, positions of a row; k frequencies, n values of a row of cos; alpha.
  // rms_norm: rows of its weight. route: groups, those kept, best of a group; n experts, k chosen;
  // alpha of a weight. experts: choices that a row of y sums; experts; from a bias of gate to that
  // of up; choices that share a row of x.
  MM_U32 heads, kv_heads, rotated, positions;
  MM_U32 window;      // attention: slots that a query sees, its own included; biases of an expert
  float alpha, beta;  // attention: of a score; of a gate; alpha of swiglu_oai
  float softcap;      // attention; epilogue; experts: the limit of gate and up
  float eps, offset;  // a norm: rsqrt(mean of x^2 + eps) * x * (offset + weight)
};

// Buffer slots. A slot that a kernel does not declare stays unbound; one that it declares is bound
// to what bound() of csrc/plan/launch.h says, and not read where a function constant says absent.
enum Slot : MM_U32 {
  kSlotX = 0,       // activations; gate of swiglu_down and act_mul; q, k and v of rope
  kSlotWeight = 1,  // packed rows; gate weight of swiglu_up; keys of a cache
  kSlotY = 2,       // result, or f32 sums (kEpiloguePartial); q of rope
  kSlotBias = 3,    // sinks of attention; of route f32; d of ssm_scan
  // mask of attention; b of gated_delta; gate of ssm_scan; logits of a shared expert, f32
  kSlotC = 4,
  kSlotWeight2 = 5,  // up weight of swiglu_up; values of a cache
  // up of swiglu_down and act_mul; second operand of a probe or add_rms_norm; gate of rms_norm; v;
  // scores of experts; a of gated_delta; dt of ssm_scan; choice_bias of route, f32; pages of a
  // cache, int64; axes of rope_tables, int64
  kSlotX2 = 6,
  kSlotIds = 7,  // int64; slots of rope_append, length of a cache; experts of choices or of tiles;
                 // positions of rope_tables
  // Weight of a norm [K], of causal_conv; of the heads of q; a_log of gated_delta and ssm_scan;
  // scale of an embedding; frequencies of rope_tables, f32
  kSlotNorm = 8,
  kSlotNorm2 = 9,  // weight of heads of k; dt_bias of gated_delta and ssm_scan; bias of causal_conv
  kSlotCos = 10,
  kSlotSin = 11,
  kSlotY2 = 12,  // x + x2 of add_rms_norm; k of rope; x in the order of lanes (arrange_x); state;
                 // ids of route, int64
  kSlotY3 = 13,  // v of rope
  kSlotPartial = 14,  // f32 partial results [parts, M, N] that the reduction pass reads
  kSlotArgs = 15,     // constant KernelArgs&
  kSlotCount = 16
};

constexpr MM_U32 slot_bit(Slot slot) { return MM_U32(1) << slot; }

// The slots that the kernels of a family declare.
enum SlotBits : MM_U32 {
  kBindProbe = slot_bit(kSlotX) | slot_bit(kSlotX2) | slot_bit(kSlotY) | slot_bit(kSlotArgs),
  kBindEpilogue = slot_bit(kSlotY) | slot_bit(kSlotBias) | slot_bit(kSlotC) | slot_bit(kSlotArgs),
  kBindMatmul = kBindEpilogue | slot_bit(kSlotX) | slot_bit(kSlotWeight),
  kBindGemv = kBindMatmul | slot_bit(kSlotNorm),
  kBindArranged = kBindMatmul | slot_bit(kSlotY2),
  kBindGemvArranged = kBindGemv | slot_bit(kSlotY2),
  kBindArrange = slot_bit(kSlotX) | slot_bit(kSlotY2) | slot_bit(kSlotArgs),
  kBindSwigluUp = kBindGemv | slot_bit(kSlotWeight2),
  kBindSwigluDown = kBindMatmul | slot_bit(kSlotX2),
  kBindExperts = kBindMatmul | slot_bit(kSlotIds),
  kBindExpertUp = kBindExperts | slot_bit(kSlotWeight2),
  kBindExpertDown = kBindExperts | slot_bit(kSlotX2),
  kBindReduce = kBindEpilogue | slot_bit(kSlotPartial),
  kBindDequantize = slot_bit(kSlotWeight) | slot_bit(kSlotY) | slot_bit(kSlotArgs),
  kBindEmbedding = kBindDequantize | slot_bit(kSlotIds) | slot_bit(kSlotNorm),
  kBindHadamard = slot_bit(kSlotX) | slot_bit(kSlotY) | slot_bit(kSlotArgs),
  kBindNorm = kBindProbe | slot_bit(kSlotNorm) | slot_bit(kSlotC),
  kBindAddNorm = kBindProbe | slot_bit(kSlotNorm) | slot_bit(kSlotY2),
  kBindRope = kBindAddNorm | slot_bit(kSlotNorm2) | slot_bit(kSlotCos) | slot_bit(kSlotSin) |
      slot_bit(kSlotY3),
  kBindRopeAppend = (kBindRope & ~(slot_bit(kSlotY2) | slot_bit(kSlotY3))) | slot_bit(kSlotIds) |
      slot_bit(kSlotWeight) | slot_bit(kSlotWeight2),
  kBindRopeTables = (kBindAddNorm & ~slot_bit(kSlotX)) | slot_bit(kSlotIds),
  kBindRoute = kBindProbe | slot_bit(kSlotBias) | slot_bit(kSlotC) | slot_bit(kSlotY2),
  kBindCausalConv = (kBindAddNorm & ~slot_bit(kSlotX2)) | slot_bit(kSlotNorm2),
  kBindGatedDelta = kBindAddNorm | slot_bit(kSlotC) | slot_bit(kSlotNorm2),
  kBindSsmScan = kBindGatedDelta | slot_bit(kSlotBias),
  kBindAttention = kBindMatmul | slot_bit(kSlotWeight2) | slot_bit(kSlotIds) | slot_bit(kSlotX2),
  kBindAttentionJoin = slot_bit(kSlotY) | slot_bit(kSlotBias) | slot_bit(kSlotPartial) |
      slot_bit(kSlotArgs)
};

// Function constants: at most six. Each removes a branch or fixes a stride.
enum FunctionConstant : MM_U32 {
  kConstantK = 0,      // uint: K, known at pipeline creation so that loops have a fixed trip count
  kConstantGroup = 1,  // uint: group size of an affine format, 0 otherwise
  kConstantScaleType = 2,  // uint: ScaleType of an affine format, 0 otherwise
  kConstantEpilogue = 3,   // uint: EpilogueBits, of rope RopeBits, of attention AttentionBits,
                           // of experts ExpertBits, of route RouteBits, of rms_norm NormBits,
                           // of gated_delta DeltaBits, of ssm_scan SsmBits, of causal_conv
                           // ConvBits, of embedding RowBits, of rope_tables TableBits
  kConstantBatch = 4,      // uint: rows of x per pass of gemv_batched and the tiles, rows of q of
                           // attention_split, 0 otherwise
  kConstantBounds = 5,     // uint: BoundsBits
  kConstantCount = 6
};

// The type of the scales and the biases of an affine format.
enum class ScaleType : MM_U32 { kF16, kBF16, kF32 };

enum EpilogueBits : MM_U32 {
  kEpilogueBias = 1,
  kEpilogueC = 2,  // + beta * c
  kEpilogueAlpha = 4,
  kEpiloguePartial = 8,      // y is f32 [parts, M, N], whatever x is; the three above are zero
  kEpilogueNorm = 16,        // x is normalised: acc is multiplied by rsqrt(mean of x^2 + eps)
  kEpilogueNormWeight = 32,  // and x by a weight,
  kEpilogueNormOffset = 64,  // to which an offset is added
  kEpilogueFactors = 128,    // bias multiplies; not beside kEpilogueBias
  kEpilogueSoftcap = 256,    // c tanh(y / c) of y
  kEpilogueActivation = 512  // times an Activation: the highest bits, of a kernel that has one
};

// Bits of expert_up and expert_down, beside kEpilogueBias and an Activation.
enum ExpertBits : MM_U32 {
  kExpertLimit = 2,        // gate and up are clamped,
  kExpertOai = 4,          // and multiplied as swiglu_oai has it, whatever the activation
  kExpertFloatScores = 64  // scores are f32, whatever x is
};

// silu: x / (1 + exp(-x)); gelu: x Phi(x); gelu_tanh: gelu by a tanh; relu2: max(x, 0) squared;
// sigmoid: 1 / (1 + exp(-x))
// X(value, name in ops, which a function of layer/activation.h has).
#define MM_ACTIVATIONS(X) \
  X(kSilu, silu)          \
  X(kGelu, gelu)          \
  X(kGeluTanh, gelu_tanh) \
  X(kRelu2, relu2)        \
  X(kSigmoid, sigmoid)
#define MM_VALUE(value, name) value,
enum class Activation : MM_U32 { MM_ACTIVATIONS(MM_VALUE) };
#undef MM_VALUE

enum ActMulBits : MM_U32 {
  kActMulRounded = 1  // gate and up are of y's dtype, else f32
};

// Bits of rms_norm, beside kEpilogueC and those of a weight.
enum NormBits : MM_U32 {
  kNormGate = 1  // the norm is multiplied by silu(x2)
};

enum RopeBits : MM_U32 {
  kRopeNormQ = 1,
  kRopeNormK = 2,
  kRopeOffset = 4,         // as kEpilogueNormOffset
  kRopeInterleaved = 8,    // values 2 i and 2 i + 1 are a pair, else i and i + rotated / 2
  kRopeApart = 16,         // v is x2
  kRopeFloatTables = 32,   // cos and sin are f32, whatever x is
  kRopeHalfKeys = 64,      // rows of keys are f16, whatever the format of values
  kRopePages = 128,        // a slot for each row, of one cache for all sequences; else a position
  kRopeWholeNorms = 256,   // the norms of q and of k are of all their heads, else of each
  kRopeNormV = 512,        // each head of v is normalised, without a weight
  kRopeRotateKeys = 1024,  // rows of keys, of values, are of what hadamard makes of them
  kRopeRotateValues = 2048
};

enum TableBits : MM_U32 {
  kTablesTwice = 1,        // a row of cos has each frequency twice,
  kTablesInterleaved = 2,  // side by side
  kTablesAxes = 4          // a frequency names its position
};

// Bits of embedding.
enum RowBits : MM_U32 {
  kRowScale = 1,       // rows are rounded, then multiplied
  kRowFloatScale = 2,  // by an f32, whatever y is
  kRowScales = 4       // a factor of each row
};

enum RouteBits : MM_U32 {
  kRouteBias = 1,
  kRouteChoiceBias = 2,
  kRouteSigmoid = 4,  // scores are; else softmax
  kRouteRenormalise = 8,
  kRouteGroups = 16,
  kRouteShared = 32  // c has a logit of one expert more, which is always chosen
};

enum ConvBits : MM_U32 {
  kConvBias = 1,
  kConvSilu = 2,
  kConvFloatWeight = 4  // weight and bias are f32, whatever x is
};

enum DeltaBits : MM_U32 {
  kDeltaFloatHeads = 1  // a_log and dt_bias are f32, whatever x is
};

enum SsmBits : MM_U32 {
  kSsmFloatHeads = 1,  // a_log, dt_bias and d are f32, whatever x is
  kSsmGate = 2
};

enum CachePages : MM_U32 { kPageSlots = 64 };

// kEpiloguePartial beside these: a part leaves its sums in the workspace.
enum AttentionBits : MM_U32 {
  kAttentionCausal = 1,
  kAttentionWindow = 2,
  kAttentionSoftcap = 4,
  kAttentionBoolMask = 16,
  kAttentionFloatMask = 32,  // f32, whatever q is
  kAttentionSinks = 64,
  kAttentionFloatSinks = 128,  // and they are f32
  kAttentionHalfKeys = 256,    // rows of keys are f16, whatever the format of values
  kAttentionPages = 512,       // slots of a sequence lie in pages, a length for each sequence
  kAttentionAlone = 1024  // causal queries, each with parts and rows as if it were the only one
};

// kBoundsN, M and K: that size has a tail. Alignment is that of the first byte and of the stride; a
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
  kBoundsLongBlocks = 128,
  kBoundsSubnormals = 256,  // the GPU keeps subnormal halves: codes may be such
  kBoundsArrangedX = 512    // gemv_batched: x lies in the order of lanes (arrange_x)
};

}  // namespace metalmm
