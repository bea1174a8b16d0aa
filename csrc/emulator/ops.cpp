// The emulator as an engine of CPU tensors: while it is installed, torch.ops.metalmm is computed by
// the shaders. torch_metalmm.testing builds them and installs it.
#include <c10/util/Exception.h>

#include <optional>

#include "gpu/register.h"
#include "launch.h"

namespace metalmm {
namespace {

Gpu g_gpu;
EmulatorOptions g_options;

const gpu::Engine& engine() {
  static const gpu::Engine e{[](c10::Device) { return g_gpu; },
                             [](const Plan& plan, const Buffers& buffers, c10::Device) {
                               launch_emulated(plan, buffers, g_options);
                             }};
  return e;
}

std::optional<gpu::InPlaceOfCpu<engine>> g_installed;

}  // namespace

void install_emulator(const std::string& chip, bool descending, uint32_t cores,
                      bool flush_subnormals) {
  TORCH_CHECK(!g_installed, "emulator: it is installed; emulated() does not nest");
  g_gpu = gpu_by_name(chip);
  if (cores) g_gpu.cores = cores;
  g_options.descending = descending;
  g_options.flush_subnormals = flush_subnormals;
  g_installed.emplace();
}

void remove_emulator() { g_installed.reset(); }

}  // namespace metalmm
