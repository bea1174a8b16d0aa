// Plans as values, and what every launcher (Metal, emulator, CUDA) takes. No torch, no Metal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "metal/abi.h"

namespace metalmm {

// One dispatch. `kernel` is <strategy>_<format>_<dtype>, a function of the shader library.
struct Pass {
  std::string kernel;
  std::array<uint32_t, 3> grid;     // threadgroups
  std::array<uint32_t, 3> threads;  // per threadgroup
  uint32_t threadgroup_bytes = 0;   // bound to [[threadgroup(0)]], which every kernel declares
  std::array<uint32_t, kConstantCount> constants{};
  uint32_t slots = 0;  // bit i: the kernel declares Slot i
  KernelArgs args{};
};

// The part of attention that torch computes at a time (sdpa): sequences and heads of keys, whose
// rows are decoded for it where they are not as q is, and queries. 0: none of it.
struct SdpaPanels {
  int64_t sequences = 0, heads = 0, queries = 0;
  // The slots that the queries see: all; with is_causal, for query i, those up to i; or those of a
  // mask of bools that is made for each panel.
  bool is_causal = false, is_masked = false;
};

struct Plan {
  std::vector<Pass> passes;  // in order; each sees what the one before wrote
  // The pass that computes. A pass before it puts x in an order of its own, in scratch of so many
  // bytes bound to kSlotY2; a pass behind it joins its results.
  size_t main = 0, arranged_bytes = 0;
  // Torch's matmul multiplies (dense): each of the first `panels` passes decodes the next
  // panel_rows rows of W, the last one perhaps fewer, to a panel [rows, K] bound to its kSlotY, and
  // the panel is multiplied before the next pass. Without such a pass W is multiplied where it
  // lies. 0: nothing is multiplied but by the passes.
  int64_t panel_rows = 0, panels = 0;
  int64_t x_rows = 0;          // rows that torch's matmul is given: those of x, and zeros
  SdpaPanels sdpa;             // without passes: each panel is decoded by a plan of its own
  size_t workspace_bytes = 0;  // scratch bound to kSlotPartial, and to kSlotY of what fills it
};

// Memory bound to a slot: a base, the byte offset at which the operand starts, and the bytes after
// it.
struct Buffer {
  void* base = nullptr;
  size_t offset = 0;
  size_t bytes = 0;
};
using Buffers = std::array<Buffer, kSlotCount>;

// A plan and the memory of its slots. An engine that is given the same one again may keep in
// `found` what it found of each pass: a pipeline, a function.
struct BoundPlan {
  Plan plan;
  Buffers buffers{};
  mutable std::vector<const void*> found{};
};
using BoundPlans = std::vector<BoundPlan>;  // in order

// The memory to which a slot that the pass declares is bound. The y of a pass that leaves f32 sums
// is the workspace, or the result where there is none. An operand that is absent (bias, c) is y
// with no bytes: the kernel does not read it. Not for kSlotArgs, which is pass.args.
inline Buffer bound(const Pass& pass, const Buffers& buffers, uint32_t slot) {
  const bool is_partial = pass.constants[kConstantEpilogue] & kEpiloguePartial;
  const Buffer& y = buffers[is_partial && buffers[kSlotPartial].base ? kSlotPartial : kSlotY];
  if (slot == kSlotY) return y;
  return buffers[slot].base ? buffers[slot] : Buffer{y.base, y.offset, 0};
}

// The calls of a launcher for a pass, written once for every launcher. An Encoder has
//
//   set_pipeline(const Pass&)              its kernel and function constants
//   set_buffer(slot, const Buffer&)
//   set_bytes(slot, const void*, size_t)   at most 4 KB, copied
//   set_threadgroup_memory(index, bytes)
//   dispatch(grid, threads)                threadgroups, threads of each
//
// Every slot that the kernel declares is set: an encoder that passes share keeps what the pass
// before has set.
template <class Encoder>
void encode(Encoder& encoder, const Pass& pass, const Buffers& buffers) {
  encoder.set_pipeline(pass);
  for (uint32_t slot = 0; slot < kSlotArgs; ++slot) {
    if (pass.slots >> slot & 1) encoder.set_buffer(slot, bound(pass, buffers, slot));
  }
  static_assert(sizeof(KernelArgs) <= 4096, "more than Metal copies");
  encoder.set_bytes(kSlotArgs, &pass.args, sizeof pass.args);
  encoder.set_threadgroup_memory(0, pass.threadgroup_bytes);
  encoder.dispatch(pass.grid, pass.threads);
}

}  // namespace metalmm
