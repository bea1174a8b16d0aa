// When encoded passes are given to the GPU. torch commits a stream where it waits for a result or
// runs short of memory, so that a forward of ours alone would be encoded whole before the GPU
// begins. No torch, no Metal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace metalmm::mps {

// Passes of a stream between two commits: MM_COMMIT of tuning.def, or METALMM_COMMIT_EVERY where it
// is set and not empty. 0: torch alone commits. Throws std::invalid_argument: the variable is not a
// whole number from 0 to 1000000.
uint32_t commit_every();

// The passes that each stream has taken since its last commit. From any thread.
class Commits {
 public:
  explicit Commits(uint32_t every) : every_(every) {}

  // Counts `passes` that were encoded on a stream: whether it shall be committed after them. A
  // commit of torch's own is not seen, and so makes the next one of ours earlier than it need be.
  bool is_due(const void* stream, size_t passes);

 private:
  uint32_t every_;
  std::mutex mutex_;
  std::unordered_map<const void*, size_t> passes_;  // streams live as long as the process
};

}  // namespace metalmm::mps
