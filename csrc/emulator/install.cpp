// The emulator as an engine of CPU tensors: while it is installed, torch.ops.metalmm is computed by
// the shaders. torch_metalmm.testing builds them and installs it.
#include "hooks/hooks.h"
#include "launch.h"

namespace metalmm {
namespace {

constexpr const char* kName = "emulator";

}  // namespace

void install_emulator(const std::string& chip, bool descending, uint32_t cores,
                      bool flush_subnormals) {
  Gpu gpu = gpu_by_name(chip);
  if (cores) gpu.cores = cores;
  EmulatorOptions options;
  options.descending = descending;
  options.flush_subnormals = flush_subnormals;
  stand_in(kName, gpu, [options](const Plan& plan, const Buffers& buffers) {
    launch_emulated(plan, buffers, options);
  });
}

void remove_emulator() { step_back(kName); }

}  // namespace metalmm
