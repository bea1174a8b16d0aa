// The ops for CUDA tensors, computed by the shaders as PTX. Nothing here needs CUDA to build.
#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>

#include "driver.h"
#include "gpu/register.h"
#include "launch.h"

namespace metalmm {
namespace {

// H200, time of norm_linear over that of rms_norm and linear, packed formats, M = 1, f16: 0.87
// to 1.04 (q4_0, the others up to 0.99) at 191,000 weights a core (6144 x 4096), 1.02 to 1.26 at
// 890,000 (28672 x 4096); `python -m bench norm`, 2026-11-22.
constexpr int64_t kNormWeightsPerCore = 1 << 18;

Gpu gpu_of(c10::Device device) {
  static std::mutex mutex;
  static std::map<int, Gpu> gpus;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = gpus.find(device.index());
  if (found == gpus.end()) {
    Gpu gpu = gpu_by_name(kCudaPlansFor);
    gpu.name = "cuda";
    gpu.norm_weights_per_core = kNormWeightsPerCore;
    gpu.cores = static_cast<uint32_t>(cuda::multiprocessors(device.index()));
    found = gpus.emplace(device.index(), gpu).first;
  }
  return found->second;
}

void launch(const Plan& plan, const Buffers& buffers, c10::Device device) {
  const c10::DeviceGuard guard(device);
  cuda::launch(plan, buffers, device.index());
}

const gpu::Engine& engine() {
  static const gpu::Engine e{gpu_of, launch};
  return e;
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, CUDA, m) { gpu::register_engine<engine>(m); }

}  // namespace metalmm
