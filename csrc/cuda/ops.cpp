// The ops for CUDA tensors, computed by the shaders as PTX. Nothing here needs CUDA to build.
#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>

#include "driver.h"
#include "gpu/register.h"
#include "launch.h"

namespace metalmm {
namespace {

Gpu gpu_of(c10::Device device) {
  static std::mutex mutex;
  static std::map<int, Gpu> gpus;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = gpus.find(device.index());
  if (found == gpus.end()) {
    Gpu gpu = gpu_by_name(kCuda);
    gpu.cores = static_cast<uint32_t>(cuda::multiprocessors(device.index()));
    found = gpus.emplace(device.index(), gpu).first;
  }
  return found->second;
}

void launch(const BoundPlans& launches, c10::Device device) {
  const c10::DeviceGuard guard(device);
  cuda::launch(launches, device.index());
}

const gpu::Engine& engine() {
  static const gpu::Engine e{gpu_of, launch};
  return e;
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, CUDA, m) { gpu::register_engine<engine>(m); }

}  // namespace metalmm
