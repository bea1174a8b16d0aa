// The parameters of every kernel on an NVIDIA GPU, before metalmm::KernelArgs: read by the kernels
// (entry.h), passed by the launcher (csrc/cuda/launch.cpp). metal/abi.h comes before it.
#pragma once

namespace metalmm {

// The buffers but the arguments, as device addresses, and the threadgroups along x and y.
template <class Address>
struct Operands {
  Address slots[kSlotArgs];
  unsigned width, height;
};

}  // namespace metalmm
