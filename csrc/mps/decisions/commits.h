// When encoded passes are given to the GPU. torch commits a stream where it waits for a result or
// runs short of memory, so that a forward of ours alone would be encoded whole before the GPU
// begins. No torch, no Metal.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace metalmm::mps {

// The passes that each stream has taken since its last commit. From any thread.
class Commits {
 public:
  using Clock = std::chrono::steady_clock;

  // Groups of so many passes, 0: never; without a number they grow, as MM_COMMIT of tuning.def
  // says.
  explicit Commits(std::optional<uint32_t> every) : every_(every) {}

  // Counts `passes` that were encoded on a stream: whether it shall be committed after them. A
  // commit of torch's own is not seen, and so makes the next one of ours earlier than it need be.
  bool is_due(const void* stream, size_t passes, Clock::time_point now = Clock::now());

 private:
  struct Stream {
    size_t passes = 0, group = 0;
    Clock::time_point last{};
  };

  std::optional<uint32_t> every_;
  std::mutex mutex_;
  std::unordered_map<const void*, Stream> streams_;  // live as long as the process
};

}  // namespace metalmm::mps
