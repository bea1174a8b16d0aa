// Why a plan is what it is, in words, written where somebody asked for them: of the 1.6 us that a
// call of plan() took, prose that nobody read was 0.9 to 1.5.
#pragma once

#include <cstdint>
#include <string>

namespace metalmm {

class Reason {
 public:
  explicit Reason(std::string* to) : to_(to) {}

  // Strings and whole numbers, one behind the other.
  template <class... Words>
  void add(const Words&... words) const {
    if (to_) (append(words), ...);
  }

 private:
  void append(const std::string& word) const { *to_ += word; }
  void append(const char* word) const { *to_ += word; }
  void append(int64_t number) const { *to_ += std::to_string(number); }

  std::string* to_;  // null: nobody asked
};

}  // namespace metalmm
