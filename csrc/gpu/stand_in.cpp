// An engine of the core's, the emulator or a recorder, in the place of the CPU's kernels.
#include <optional>
#include <utility>

#include "hooks/hooks.h"
#include "register.h"

namespace metalmm::gpu {
namespace {

Gpu g_gpu;
HostLaunch g_launch;

const Engine& engine() {
  static const Engine e{[](c10::Device) { return g_gpu; },
                        [](const BoundPlans& all, c10::Device) { g_launch(all); }};
  return e;
}

std::optional<InPlaceOfCpu<engine>> g_installed;

void replace_cpu(const Gpu& gpu, HostLaunch launch) {
  g_gpu = gpu;
  g_launch = std::move(launch);
  g_installed.emplace();
  replay::change_engine();
}

void restore_cpu() {
  g_installed.reset();
  replay::change_engine();
}

const bool g_is_handed_over = [] {
  hooks().replace_cpu = replace_cpu;
  hooks().restore_cpu = restore_cpu;
  return true;
}();

}  // namespace
}  // namespace metalmm::gpu
