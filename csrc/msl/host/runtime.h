// Checks that the emulator makes, and copies of memory, for the other headers here.
#pragma once

#include "language/types.h"

#include "abi.h"  // after the types, by which it knows a shader

namespace metal {
namespace emulator {

METAL_FUNC void access(const void* p, ulong n, bool write, bool atomic = false) {
#ifdef MM_CHECKED
  mm_access(p, n, write, atomic);
#else
  (void)p, (void)n, (void)write, (void)atomic;
#endif
}

// A collective whose value each lane computes by itself: only that all lanes come here is checked.
METAL_FUNC void checkpoint(const char* kind, const char* file, uint line) {
#ifdef MM_CHECKED
  mm_collective(kMmScopeSimd, kind, 0, file, line, nullptr, nullptr, nullptr);
#else
  (void)kind, (void)file, (void)line;
#endif
}
METAL_FUNC void site(const char* file, uint line) {
#ifdef MM_CHECKED
  mm_site(file, line);
#else
  (void)file, (void)line;
#endif
}

// Copies of structs out of and into an address space, which C++ has no implicit constructors for.
template <class T>
METAL_FUNC T copy_bytes(const void* from) {
  T v;
  __builtin_memcpy((void*)&v, from, sizeof(T));
  return v;
}
template <class T>
METAL_FUNC T load(const device T& x) {
  return copy_bytes<T>((const void*)&x);
}
template <class T>
METAL_FUNC T load(constant T& x) {
  return copy_bytes<T>((const void*)&x);
}
template <class T>
METAL_FUNC T load(const threadgroup T& x) {
  return copy_bytes<T>((const void*)&x);
}
template <class T>
METAL_FUNC T load(const thread T& x) {
  return x;
}
#define MM_STORE(space)                                           \
  template <class T>                                              \
  METAL_FUNC void store(space T& to, T value) {                   \
    __builtin_memcpy((void*)&to, (const void*)&value, sizeof(T)); \
  }
MM_STORE(device)
MM_STORE(threadgroup)
MM_STORE(thread)
#undef MM_STORE

}  // namespace emulator
}  // namespace metal

// The caller's place, as trailing parameters of each collective.
#define MM_SITE const char *file = __builtin_FILE(), uint line = __builtin_LINE()

template <class T>
METAL_FUNC bool is_function_constant_defined(constant T& value) {
  return mm_constant_is_set((const void*)&value);
}
