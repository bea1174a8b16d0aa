// torch.ops.metalmm for MPS tensors.
#include "gpu/register.h"
#include "hooks/hooks.h"
#include "launch.h"

namespace metalmm::mps {
namespace {

const gpu::Engine& engine() {
  static const auto* e =
      new gpu::Engine{[](c10::Device) { return gpu(); },
                      [](const Plan& plan, const Buffers& b, c10::Device) { launch(plan, b); }};
  return *e;
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, MPS, m) {
  hooks().mps_facts = [](Facts* out) { *out = facts(); };
  gpu::register_engine<engine>(m);
}

}  // namespace metalmm::mps
