// What a launcher sets for a pass, written once for every launcher. An Encoder has
//
//   set_pipeline(const Pass&)              its kernel and function constants
//   set_buffer(slot, const Buffer&)
//   set_bytes(slot, const void*, size_t)   at most 4 KB, copied
//   set_threadgroup_memory(index, bytes)
//   dispatch(grid, threads)                threadgroups, threads of each
//
// Every slot that the kernel declares is set: an encoder that passes share keeps what the pass
// before has set.
#pragma once

#include "launch.h"

namespace metalmm {

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
