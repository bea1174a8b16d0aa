// Strategies by name. An op takes those of plan(), unless the engine that computes on tensors of
// that type of device has its own and says so here: ops know no engine.
#pragma once

#include <c10/core/DeviceType.h>

#include <optional>
#include <string_view>

#include "checks.h"

namespace metalmm {

// Throws std::invalid_argument that lists the engine's strategies: it has none of that name.
using StrategyCheck = void (*)(std::string_view name);

// The check for tensors of a type of device from now on; null: the names are those of plan().
// Returns the one before.
StrategyCheck set_strategy_check(c10::DeviceType type, StrategyCheck check);

// As the engine of x's device checks it; meta is none, and takes any name. ValueError.
void check_strategy(OptionalName name, const at::Tensor& x);

// The strategy of plan() of that name. ValueError that lists those of a linear layer.
std::optional<StrategyId> find_strategy(OptionalName name, const at::Tensor& x);

}  // namespace metalmm
