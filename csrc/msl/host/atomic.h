// <metal_atomic>: relaxed atomics on device and threadgroup memory.
#pragma once

#include "language/traits.h"
#include "runtime.h"

namespace metal {

enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };
enum thread_scope {
  thread_scope_thread,
  thread_scope_threadgroup = 2,
  thread_scope_device = 3,
  thread_scope_simdgroup = 4
};

template <class T>
struct atomic {
  T value;
};

template <class A>
struct atomic_value;
#define MM_ATOMIC_SPACE(space)                           \
  template <class T>                                     \
  struct atomic_value<volatile space atomic<T>*> {       \
    using type = T;                                      \
  };                                                     \
  template <class T>                                     \
  struct atomic_value<space atomic<T>*> {                \
    using type = T;                                      \
  };                                                     \
  template <class T>                                     \
  struct atomic_value<const volatile space atomic<T>*> { \
    using type = T;                                      \
  };                                                     \
  template <class T>                                     \
  struct atomic_value<const space atomic<T>*> {          \
    using type = T;                                      \
  };
MM_ATOMIC_SPACE(device)
MM_ATOMIC_SPACE(threadgroup)
#undef MM_ATOMIC_SPACE
template <class A>
using atomic_value_t = typename atomic_value<A>::type;

namespace emulator {

// Apart, so that clang does not report them as plain accesses, which may not race.
template <class T>
__attribute__((noinline, no_sanitize("kernel-address"))) T load_relaxed(const T* p) {
  T v;
  __atomic_load(p, &v, __ATOMIC_RELAXED);
  return v;
}
template <class T>
__attribute__((noinline, no_sanitize("kernel-address"))) void store_relaxed(T* p, T v) {
  __atomic_store(p, &v, __ATOMIC_RELAXED);
}

}  // namespace emulator

template <class A>
METAL_FUNC atomic_value_t<A> atomic_load_explicit(A p, memory_order) {
  emulator::access((const void*)&p->value, sizeof(atomic_value_t<A>), false, true);
  return emulator::load_relaxed((const atomic_value_t<A>*)&p->value);
}
template <class A>
METAL_FUNC void atomic_store_explicit(A p, atomic_value_t<A> v, memory_order) {
  emulator::access((const void*)&p->value, sizeof(v), true, true);
  emulator::store_relaxed((atomic_value_t<A>*)&p->value, v);
}
template <class A>
METAL_FUNC atomic_value_t<A> atomic_exchange_explicit(A p, atomic_value_t<A> v, memory_order) {
  atomic_value_t<A> old;
  emulator::access((const void*)&p->value, sizeof(v), true, true);
  __atomic_exchange((atomic_value_t<A>*)&p->value, &v, &old, __ATOMIC_RELAXED);
  return old;
}
template <class A>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(A p, thread atomic_value_t<A>* expected,
                                                      atomic_value_t<A> v, memory_order,
                                                      memory_order) {
  emulator::access((const void*)&p->value, sizeof(v), true, true);
  return __atomic_compare_exchange((atomic_value_t<A>*)&p->value, expected, &v, false,
                                   __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define MM_FETCH(name, next)                                                                     \
  template <class A>                                                                             \
  METAL_FUNC atomic_value_t<A> atomic_fetch_##name##_explicit(A p, atomic_value_t<A> v,          \
                                                              memory_order order) {              \
    atomic_value_t<A> old = atomic_load_explicit(p, order);                                      \
    while (!atomic_compare_exchange_weak_explicit(p, &old, static_cast<atomic_value_t<A>>(next), \
                                                  order, order)) {                               \
    }                                                                                            \
    return old;                                                                                  \
  }
MM_FETCH(add, old + v)
MM_FETCH(sub, old - v)
MM_FETCH(min, old < v ? old : v)
MM_FETCH(max, old > v ? old : v)
MM_FETCH(and, old& v)
MM_FETCH(or, old | v)
MM_FETCH(xor, old ^ v)
#undef MM_FETCH

}  // namespace metal

using atomic_int = metal::atomic<int>;
using atomic_uint = metal::atomic<uint>;
using atomic_bool = metal::atomic<bool>;
using atomic_ulong = metal::atomic<ulong>;
using atomic_float = metal::atomic<float>;
