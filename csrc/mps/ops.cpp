// torch.ops.metalmm for MPS tensors.
#include "gpu/register.h"
#include "hooks/hooks.h"
#include "launch.h"

namespace metalmm::mps {
namespace {

void use_weight(const c10::Storage& storage) {
  keep_resident(storage.data(), [&] {
    const c10::weak_intrusive_ptr<c10::StorageImpl> weak = storage.getWeakStorageImpl();
    const auto lock = [weak]() -> std::shared_ptr<void> {
      if (auto held = weak.lock()) return std::make_shared<decltype(held)>(std::move(held));
      return nullptr;
    };
    return WeakWeight{[weak] { return weak.expired(); }, lock};
  });
}

const gpu::Engine& engine() {
  static const auto* e = new gpu::Engine{
      [](c10::Device) { return gpu(); },
      [](const Plan& plan, const Buffers& b, c10::Device) { launch(plan, b); }, use_weight};
  return *e;
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, MPS, m) {
  hooks().mps_facts = [](Facts* out) { *out = facts(); };
  hooks().mps_compile = compile;
  gpu::register_engine<engine>(m);
}

}  // namespace metalmm::mps
