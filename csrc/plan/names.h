// Looking a name up: one rule of case and one message for all that has a name.
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

// "a, b" of name_of(0) ... name_of(count - 1).
template <class NameOf>
std::string join_names(int count, NameOf name_of) {
  std::string out;
  for (int i = 0; i < count; ++i) out += (i ? ", " : "") + std::string(name_of(i));
  return out;
}

// "argument: unknown 'given'where; allowed: a, b"
template <class NameOf>
std::string unknown_name(std::string_view argument, std::string_view given, int count,
                         NameOf name_of, std::string_view where = "") {
  return std::string(argument) + ": unknown '" + std::string(given) + "'" + std::string(where) +
         "; allowed: " + join_names(count, name_of);
}

// The index i in [0, count) whose name_of(i) is `given`, in any case. Throws std::invalid_argument:
// unknown_name().
template <class NameOf>
int find_name(std::string_view argument, std::string_view given, int count, NameOf name_of,
              std::string_view where = "") {
  const std::string wanted = lower(given);
  for (int i = 0; i < count; ++i) {
    if (wanted == name_of(i)) return i;
  }
  throw std::invalid_argument(unknown_name(argument, given, count, name_of, where));
}

}  // namespace metalmm
