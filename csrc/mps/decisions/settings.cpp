#include "settings.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace metalmm::mps {
namespace {

constexpr size_t kMostDigits = 7;
constexpr uint32_t kMost = 1000000;

// The number that a variable is set to, none where it is empty or not there. `unit` is what it
// counts.
std::optional<uint32_t> number_of(const char* variable, const char* unit) {
  const char* set = std::getenv(variable);
  if (!set || !*set) return std::nullopt;
  const std::string text = set;
  const bool is_number =
      text.size() <= kMostDigits && text.find_first_not_of("0123456789") == std::string::npos;
  const unsigned long value = is_number ? std::stoul(text) : kMost + 1;
  if (value <= kMost) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(variable) + ": '" + text +
                              "' must be a whole number of " + unit + " from 0 (never) to " +
                              std::to_string(kMost));
}

}  // namespace

std::optional<uint32_t> commit_every() { return number_of("METALMM_COMMIT_EVERY", "passes"); }

uint32_t sdpa_from() { return number_of("METALMM_SDPA_FROM", "queries").value_or(0); }

}  // namespace metalmm::mps
