// Facts that a Metal device reports, and whether the engine runs on it. No torch, no Metal.
#pragma once

#include <cstdint>
#include <string>

#include "plan/gpu.h"

namespace metalmm::mps {

struct Facts {
  std::string name;    // "Apple M4 Max"
  int family = 0;      // n of the newest MTLGPUFamilyApple<n>; 0: not an Apple GPU
  uint32_t cores = 0;  // 0: not known
  uint32_t max_threadgroup_memory = 0;
  uint32_t max_threads = 0;  // threads of a threadgroup, along its first axis
  int macos = 0;             // major version
};

constexpr int kFirstFamily = 7;  // M1's
constexpr int kLastFamily = 20;  // the newest that a device is asked for; the newest chip's is 10
constexpr int kFirstMacOS = 14;  // has Metal 3.1, and so bfloat

// The GPU of a virtual machine on a Mac, hosted runners of GitHub included: it executes on the
// Apple GPU of the host, M1 or newer, and admits to family 5 at most (Metal.jl 309, pytorch
// 196881).
constexpr const char* kVirtualDevice = "Apple Paravirtual device";

// The machine to plan for, a virtual one as an M1 with 32 KiB of threadgroup memory. Throws
// std::runtime_error: older than an M1 or than macOS 14.
Gpu supported_gpu(const Facts& facts);

}  // namespace metalmm::mps
