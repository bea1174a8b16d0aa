#include "collect.h"

#include <algorithm>

namespace metalmm::mps {

void Collector::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  passes_.clear();
  thread_ = std::this_thread::get_id();
  is_on_ = true;
}

bool Collector::takes(const BoundPlans& launches) {
  if (!is_on_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_ != std::this_thread::get_id()) return false;
  for (const BoundPlan& each : launches) {
    for (const Pass& pass : each.plan.passes) {
      const auto same = [&](const Pass& other) {
        return other.kernel == pass.kernel && other.constants == pass.constants;
      };
      if (std::none_of(passes_.begin(), passes_.end(), same)) passes_.push_back(pass);
    }
  }
  return true;
}

std::vector<Pass> Collector::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = false;
  return std::move(passes_);
}

Collector& collector() {
  static Collector c;
  return c;
}

}  // namespace metalmm::mps
