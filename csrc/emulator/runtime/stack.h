// The stack of a GPU thread, or of the OS thread that runs it, as AddressSanitizer must know it.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace metalmm {

// Empty in a build without it.
struct Stack {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  void* fake;

  void set(const void* begin, size_t n) {
    bottom = begin, bytes = n, fake = nullptr;
    ASAN_UNPOISON_MEMORY_REGION(begin, n);  // poisoned by frames that were left for good
  }
  void set_to_thread() {
    pthread_attr_t attributes;
    void* begin;
    size_t n;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &n);
    pthread_attr_destroy(&attributes);
    bottom = begin, bytes = n, fake = nullptr;
  }
  void leave(const Stack& to) { __sanitizer_start_switch_fiber(&fake, to.bottom, to.bytes); }
  void enter() { __sanitizer_finish_switch_fiber(fake, nullptr, nullptr); }
#else
  void set(const void*, size_t) {}
  void set_to_thread() {}
  void leave(const Stack&) {}
  void enter() {}
#endif
};

}  // namespace metalmm
