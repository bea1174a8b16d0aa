// The weights that the GPU shall not have to wire anew. torch makes no residency set: after a pause
// of a second macOS unwires what nobody uses, and the next token waits for it (llama.cpp 10119 on
// an M4 Pro: 318 ms in place of 64; its 11427 and 17766 mend it as is done here). No torch, no
// Metal.
//
// A Set has the type Handle, what is kept resident, which owns it and converts to bool, and
//
//   Handle of(const void* buffer)     what a buffer is a part of: its heap, or itself
//   void add(Handle), remove(Handle)  staged
//   void commit()                     what was staged
//   void request(), end()             asks for residency, and no longer
//
// A Weak is of a weight: expired(), and lock(), what keeps it alive, or false.
#pragma once

#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace metalmm::mps {

// macOS unwires after a second. From macOS 26 on one request lasts no longer than that.
constexpr auto kBeat = std::chrono::milliseconds(500);
// Time that a weight without use stays resident, as in llama.cpp.
constexpr auto kKeepFor = std::chrono::minutes(3);

template <class Set, class Weak>
class Residency {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Residency(Set set) : set_(std::move(set)) {}

  // Kernels read weights that were told of. From any thread, as what follows.
  void use(Clock::time_point now = Clock::now()) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_ = now;
  }

  // A kernel reads a weight of this buffer. It talks to no device.
  template <class MakeWeak>
  void use(const void* buffer, MakeWeak weak, Clock::time_point now = Clock::now()) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_ = now;
    const auto at = weights_.find(buffer);
    if (at == weights_.end()) {
      weights_.emplace(buffer, Weight{weak(), {}});
    } else if (at->second.weak.expired()) {  // torch gave its memory to another
      at->second.weak = weak();
    }
  }

  // Every kBeat, from one thread: takes in what was used, lets go of what is no more, and asks
  // again while the model is in use.
  void beat(Clock::time_point now = Clock::now()) {
    std::lock_guard<std::mutex> lock(mutex_);
    bool is_changed = false;
    for (auto at = weights_.begin(); at != weights_.end();) {
      const auto held = at->second.weak.lock();  // so that its buffer lives as it is asked
      const bool is_gone = !held;
      if (is_gone != !at->second.handle) {
        // Lives and is not in the set, or the reverse.
        is_gone ? release(at->second) : take(at->first, at->second);
        is_changed = true;
      }
      at = is_gone ? weights_.erase(at) : std::next(at);
    }
    if (is_changed) set_.commit();
    const bool is_used = !weights_.empty() && now - last_ < kKeepFor;
    if (is_used) {
      set_.request();
    } else if (is_resident_) {
      set_.end();
    }
    is_resident_ = is_used;
  }

 private:
  using Handle = typename Set::Handle;
  struct Weight {
    Weak weak;
    Handle handle;  // false: not taken in
  };

  void take(const void* buffer, Weight& weight) {
    weight.handle = set_.of(buffer);
    if (counts_[weight.handle]++ == 0) set_.add(weight.handle);
  }
  void release(const Weight& weight) {
    if (--counts_[weight.handle] == 0) {
      set_.remove(weight.handle);
      counts_.erase(weight.handle);
    }
  }

  Set set_;
  std::mutex mutex_;
  std::map<const void*, Weight> weights_;
  std::map<Handle, int> counts_;  // weights of a heap: those below a megabyte share one
  Clock::time_point last_{};
  bool is_resident_ = false;
};

}  // namespace metalmm::mps
