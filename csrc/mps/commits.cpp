#include "commits.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace metalmm::mps {
namespace {

#define MM_COMMIT(passes) constexpr uint32_t kCommitEvery = passes;
#include "plan/tuning.def"

constexpr const char* kVariable = "METALMM_COMMIT_EVERY";
constexpr size_t kMostDigits = 7;
constexpr uint32_t kMost = 1000000;

}  // namespace

uint32_t commit_every() {
  const char* set = std::getenv(kVariable);
  if (!set || !*set) return kCommitEvery;
  const std::string text = set;
  const bool is_number =
      text.size() <= kMostDigits && text.find_first_not_of("0123456789") == std::string::npos;
  const unsigned long value = is_number ? std::stoul(text) : kMost + 1;
  if (value <= kMost) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(kVariable) + ": '" + text +
                              "' must be a whole number of passes from 0 (never) to " +
                              std::to_string(kMost));
}

bool Commits::is_due(const void* stream, size_t passes) {
  if (!every_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t& count = passes_[stream];
  count += passes;
  if (count < every_) return false;
  count = 0;
  return true;
}

}  // namespace metalmm::mps
