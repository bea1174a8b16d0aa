// How a product is computed, by name. An op takes the strategies of plan() and exact activations,
// unless the engine that computes on tensors of that type of device has its own strategies and says
// so here: ops know no engine.
#pragma once

#include <c10/core/DeviceType.h>

#include <optional>
#include <string_view>

#include "checks.h"

namespace metalmm {

// The form of x in a product: its values, or those rounded to 8 or 16 bits in blocks that share a
// scale.
enum class Activations { kExact, kInt8, kInt16 };

// Throws std::invalid_argument that lists the engine's strategies for such activations: it has none
// of that name.
using StrategyCheck = void (*)(std::string_view name, Activations activations);

// The check for tensors of a type of device from now on; null: the names are those of plan(), and
// activations are exact.
// Returns the one before.
StrategyCheck set_strategy_check(c10::DeviceType type, StrategyCheck check);

// The check by the engine of x's device; meta is no engine, and takes any name. ValueError.
void check_strategy(OptionalName name, const at::Tensor& x,
                    Activations activations = Activations::kExact);

// Activations by name: nothing is exact. ValueError where no such name is, or where the engine of
// x's device rounds none; meta is no engine, and takes each.
Activations check_activations(OptionalName name, const at::Tensor& x);

// The strategy of plan() of that name. ValueError that lists those of a linear layer.
std::optional<StrategyId> find_strategy(OptionalName name, const at::Tensor& x);

// find_strategy() and check_strategy() for products of experts, by `op` or in tiles.
std::optional<StrategyId> find_expert_strategy(OptionalName name, const at::Tensor& x, Op op);
void check_expert_strategy(OptionalName name, const at::Tensor& x, Activations activations, Op op);

}  // namespace metalmm
