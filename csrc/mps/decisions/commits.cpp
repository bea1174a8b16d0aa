#include "commits.h"

#include <algorithm>

namespace metalmm::mps {
namespace {

struct Groups {
  size_t first, most;
  std::chrono::microseconds pause;
};

constexpr Groups kGroups =
#define MM_COMMIT(first, most, pause_us) {first, most, std::chrono::microseconds(pause_us)};
#include "plan/tuning.def"

}  // namespace

bool Commits::is_due(const void* stream, size_t passes, Clock::time_point now) {
  if (every_ && !*every_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& s = streams_[stream];
  if (every_) {
    s.group = *every_;
  } else if (!s.group || now - s.last > kGroups.pause) {
    s.group = kGroups.first;
  }
  s.last = now;
  s.passes += passes;
  if (s.passes < s.group) return false;
  s.passes = 0;
  s.group = std::min(2 * s.group, kGroups.most);
  return true;
}

}  // namespace metalmm::mps
