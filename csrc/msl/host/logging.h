// <metal_logging>: each message is a line on stderr.
#pragma once

#include "runtime.h"

namespace metal {
namespace emulator {

METAL_FUNC float printable(half x) { return x; }
METAL_FUNC float printable(bfloat x) { return x; }
template <class T>
METAL_FUNC T printable(T x) {
  static_assert(__is_scalar(T), "the emulator logs scalars only");
  return x;
}

}  // namespace emulator

// The functions of a logger are static: it is in constant memory, where plain clang has no `this`.
// For the same reason it is an aggregate; translate.py writes braces for os_log name("…", "…").
struct os_log {
  const char *subsystem, *category;

#define MM_LOG(name, level)                                 \
  template <class... A>                                     \
  static METAL_FUNC void name(const char* format, A... a) { \
    mm_log(level, format, emulator::printable(a)...);       \
  }
  MM_LOG(log, "log")
  MM_LOG(log_debug, "debug")
  MM_LOG(log_info, "info")
  MM_LOG(log_error, "error")
  MM_LOG(log_fault, "fault")
#undef MM_LOG
};
inline constexpr os_log os_log_default{};

}  // namespace metal
