// torch.ops.metalmm for MPS tensors.
#include "decisions/collect.h"
#include "gpu/operands.h"
#include "gpu/register.h"
#include "hooks/hooks.h"
#include "launch.h"
#include "plan/subnormals.h"

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

// launch() on operands in the host's memory.
void launch_on_host(const BoundPlans& launches) {
  const Buffers& host = launches.front().buffers;
  BoundPlans on_device{{launches.front().plan}};
  Buffers& buffers = on_device.front().buffers;
  std::array<at::Tensor, kSlotCount> bytes, device;
  for (size_t slot = 0; slot < host.size(); ++slot) {
    if (!host[slot].base) continue;
    const auto size = static_cast<int64_t>(host[slot].bytes);
    bytes[slot] = at::from_blob(host[slot].base, {size}, at::kByte);
    device[slot] = bytes[slot].to(at::kMPS);
    buffers[slot] = gpu::buffer_of(device[slot]);
  }
  launch(on_device);
  bytes[kSlotY].copy_(device[kSlotY]);
}

// The machine to plan for, tested once.
const Gpu& tested_gpu() {
  static const Gpu tested = [] {
    Gpu out = gpu();
    out.keeps_subnormals = keeps_subnormals(out, launch_on_host);
    return out;
  }();
  return tested;
}

void launch_or_collect(const BoundPlans& launches, c10::Device) {
  if (!collector().takes(launches)) launch(launches);
}

const gpu::Engine& engine() {
  static const auto* e =
      new gpu::Engine{[](c10::Device) { return tested_gpu(); }, launch_or_collect, use_weight};
  return *e;
}

}  // namespace

TORCH_LIBRARY_IMPL(metalmm, MPS, m) {
  hooks().mps_facts = [](Facts* out) { *out = facts(); };
  hooks().mps_compile = compile;
  gpu::register_engine<engine>(m);
}

}  // namespace metalmm::mps
