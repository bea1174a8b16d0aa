#include "strategies.h"

#include <array>
#include <atomic>
#include <vector>

namespace metalmm {
namespace {

// The check of a type of device. In a function: engines set theirs while the module is loaded, in
// any order.
std::atomic<StrategyCheck>& check_of(c10::DeviceType type) {
  constexpr auto kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
  static std::array<std::atomic<StrategyCheck>, kTypes> checks{};
  return checks.at(static_cast<size_t>(type));
}

}  // namespace

StrategyCheck set_strategy_check(c10::DeviceType type, StrategyCheck check) {
  return check_of(type).exchange(check);
}

void check_strategy(OptionalName name, const at::Tensor& x, Activations activations, Op op) {
  if (!name.has_value() || x.is_meta()) return;
  if (const StrategyCheck check = check_of(x.device().type())) {
    or_value_error([&] { check(*name, activations); });
  } else {
    find_strategy(name, x, op);
  }
}

Activations check_activations(OptionalName name, const at::Tensor& x) {
  if (!name.has_value()) return Activations::kExact;
  constexpr const char* kInt8 = "int8";
  or_value_error([&] { return find_name("activations", *name, 1, [&](int) { return kInt8; }); });
  const c10::DeviceType type = x.device().type();
  TORCH_CHECK_VALUE(x.is_meta() || check_of(type).load(), "activations: '", *name, "' on ",
                    c10::DeviceTypeName(type, true),
                    "; only the native CPU engine rounds activations, allowed here: None");
  return Activations::kInt8;
}

std::optional<StrategyId> find_strategy(OptionalName name, const at::Tensor& x, Op op) {
  if (!name.has_value()) return std::nullopt;
  const std::vector<StrategyId> able = strategies_of(op);
  return able[check_name("strategy", *name, able, c10::DeviceTypeName(x.device().type(), true))];
}

}  // namespace metalmm
