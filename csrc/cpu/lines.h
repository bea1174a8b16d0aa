// Memory whose vectors lie each in one line of the cache.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace metalmm::cpu {

// A load of 64 bytes that crosses a line costs two: Xeon with AVX-512, q4_0 14336 x 4096, M = 4,
// x from 16 bytes into a line on 2.6 ms, from its beginning 2.3. A value without arguments is left
// uninitialised, as vectors of `n` values are.
template <class T>
struct LineAllocator {
  static constexpr std::align_val_t kLine{64};
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  template <class U>
  void construct(U* p) {
    ::new (static_cast<void*>(p)) U;
  }
  template <class U, class V>
  void construct(U* p, const V& value) {
    ::new (static_cast<void*>(p)) U(value);
  }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

}  // namespace metalmm::cpu
