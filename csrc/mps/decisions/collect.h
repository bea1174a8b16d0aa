// The kernels that a model needs, before it needs them: a forward whose plans are collected in the
// place of being launched, so that they can be compiled side by side. No torch, no Metal.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "plan/launch.h"

namespace metalmm::mps {

class Collector {
 public:
  // From here on the plans of this thread are collected.
  void begin();

  // Whether plans of this thread are collected, and so not launched.
  bool takes(const BoundPlans& launches);

  // Until here. The passes, of each pipeline one, in the order of their first use.
  std::vector<Pass> end();

 private:
  std::atomic<bool> is_on_{false};  // read at every launch
  std::mutex mutex_;
  std::thread::id thread_;
  std::vector<Pass> passes_;
};

Collector& collector();

}  // namespace metalmm::mps
