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

// Whether nothing is left to check of a strategy: none is asked for, x is on meta, or the engine of
// its device has strategies of its own.
bool is_checked_by_engine(OptionalName name, const at::Tensor& x, Activations activations) {
  if (!name.has_value() || x.is_meta()) return true;
  const StrategyCheck check = check_of(x.device().type());
  if (check) or_value_error([&] { check(*name, activations); });
  return check != nullptr;
}

std::optional<StrategyId> find_among(const std::vector<StrategyId>& able, OptionalName name,
                                     const at::Tensor& x) {
  if (!name.has_value()) return std::nullopt;
  return able[check_name("strategy", *name, able, c10::DeviceTypeName(x.device().type(), true))];
}

}  // namespace

StrategyCheck set_strategy_check(c10::DeviceType type, StrategyCheck check) {
  return check_of(type).exchange(check);
}

void check_strategy(OptionalName name, const at::Tensor& x, Activations activations) {
  if (!is_checked_by_engine(name, x, activations)) find_strategy(name, x);
}

void check_expert_strategy(OptionalName name, const at::Tensor& x, Activations activations, Op op) {
  if (!is_checked_by_engine(name, x, activations)) find_expert_strategy(name, x, op);
}

Activations check_activations(OptionalName name, const at::Tensor& x) {
  if (!name.has_value()) return Activations::kExact;
  constexpr const char* kNames[] = {"int8", "int16"};  // behind kExact
  const int kind = check_word("activations", *name, kNames);
  const c10::DeviceType type = x.device().type();
  TORCH_CHECK_VALUE(x.is_meta() || check_of(type).load(), "activations: '", *name, "' on ",
                    c10::DeviceTypeName(type, true),
                    "; only the native CPU engine rounds activations, allowed here: None");
  return static_cast<Activations>(1 + kind);
}

std::optional<StrategyId> find_strategy(OptionalName name, const at::Tensor& x) {
  return find_among(strategies_of(Op::kLinear), name, x);
}

std::optional<StrategyId> find_expert_strategy(OptionalName name, const at::Tensor& x, Op op) {
  return find_among({strategies_of(op)[0], strategies_of(Op::kExpertTiles)[0]}, name, x);
}

}  // namespace metalmm
