// The emulator as an engine of CPU tensors: while it is installed, torch.ops.metalmm is computed by
// the shaders. torch_metalmm.testing builds them and installs it.
#include "hooks/hooks.h"
#include "launch.h"
#include "plan/subnormals.h"

namespace metalmm {
namespace {

constexpr const char* kName = "emulator";

}  // namespace

bool install_emulator(const std::string& chip, bool descending, uint32_t cores,
                      bool flush_subnormals) {
  Gpu gpu = gpu_by_name(chip);
  if (cores) gpu.cores = cores;
  EmulatorOptions options;
  options.descending = descending;
  options.flush_subnormals = flush_subnormals;
  const auto launch = [options](const BoundPlans& all) { launch_emulated(all, options); };
  gpu.keeps_subnormals = gpu.keeps_subnormals && keeps_subnormals(gpu, launch);
  stand_in(kName, gpu, launch);
  return gpu.keeps_subnormals;
}

void remove_emulator() { step_back(kName); }

}  // namespace metalmm
