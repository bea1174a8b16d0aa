#include "facts.h"

#include <stdexcept>

namespace metalmm::mps {

Gpu supported_gpu(const Facts& given) {
  Facts f = given;
  if (f.name == kVirtualDevice) {
    f.family = kFirstFamily;
    f.max_threadgroup_memory = 32 << 10;
  }
  const std::string instead = "; use device=\"cpu\", where every op runs";
  if (f.family < kFirstFamily) {
    throw std::runtime_error(
        "metalmm: the Metal engine needs an Apple GPU, M1 or newer; this Mac has " + f.name +
        instead);
  }
  if (f.macos < kFirstMacOS) {
    throw std::runtime_error(
        "metalmm: the Metal engine needs macOS " + std::to_string(kFirstMacOS) +
        " or newer, for Metal 3.1; this is macOS " + std::to_string(f.macos) + instead);
  }
  Gpu gpu = gpu_of_device(f.name, f.family, f.cores, f.max_threadgroup_memory);
  if (f.max_threads) gpu.max_threads = f.max_threads;
  return gpu;
}

}  // namespace metalmm::mps
