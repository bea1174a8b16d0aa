// Checks that the emulator makes, and copies of memory, for the other headers here.
#pragma once

#include "language/traits.h"

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

// The number of which a pointer to T in a space is a multiple: where MM_ELEMENT_ALIGNED, of a
// vector in device memory its element's size.
template <class T>
constexpr uint alignment_of() {
  using Plain = remove_cv_t<remove_addrspace_t<T>>;
  if constexpr (__is_void(Plain)) {
    return 1;
  } else if constexpr (vector_of<Plain>::size > 1 && space_of<T>::value == 1) {
    return sizeof(element_t<Plain>);
  } else {
    return alignof(Plain);
  }
}

// (P)x, which may not change an address space: msl/translate.py writes it for casts to pointers.
template <class P, class X>
constexpr bool keeps_space() {
  if constexpr (__is_pointer(X)) {
    return space_of<__remove_pointer(P)>::value == space_of<__remove_pointer(X)>::value;
  }
  return true;
}
template <class P, class X, enable_if_t<keeps_space<P, X>(), int> = 0>
METAL_FUNC P cast_pointer(X x, const char* file = __builtin_FILE(), uint line = __builtin_LINE()) {
#ifdef MM_ELEMENT_ALIGNED  // clang then assumes nothing of pointers, and checks none
  mm_aligned((const void*)x, alignment_of<__remove_pointer(P)>(), file, line);
#else
  (void)file, (void)line;
#endif
  return (P)x;
}
template <class P, class X, enable_if_t<!keeps_space<P, X>(), int> = 0>
P cast_pointer(X x) = delete;

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
