// Looking a name up: one rule of case and one message for strategies, dtypes, ops and probes.
#pragma once

#include <cctype>
#include <stdexcept>
#include <string>
#include <string_view>

namespace metalmm {

inline std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// The index i in [0, count) whose name_of(i) is `given`, in any case. Throws std::invalid_argument:
// "argument: unknown 'given'where; allowed: a, b".
template <class NameOf>
int find_name(std::string_view argument, std::string_view given, int count, NameOf name_of,
              std::string_view where = "") {
  const std::string wanted = lower(given);
  std::string allowed;
  for (int i = 0; i < count; ++i) {
    if (wanted == name_of(i)) return i;
    allowed += (i ? ", " : "") + std::string(name_of(i));
  }
  throw std::invalid_argument(std::string(argument) + ": unknown '" + std::string(given) + "'" +
                              std::string(where) + "; allowed: " + allowed);
}

}  // namespace metalmm
