// Settings of the Metal engine from the environment. No torch, no Metal.
#pragma once

#include <cstdint>
#include <optional>

namespace metalmm::mps {

// METALMM_COMMIT_EVERY: passes of a stream between two commits; 0: torch alone commits. None: as
// MM_COMMIT of tuning.def. Throws std::invalid_argument: it is set, not empty, and no whole number
// from 0 to 1000000.
std::optional<uint32_t> commit_every();

// METALMM_SDPA_FROM: queries from which torch's attention takes what it can; 0: as MM_SDPA_FROM of
// tuning.def. Throws std::invalid_argument, as commit_every().
uint32_t sdpa_from();

}  // namespace metalmm::mps
