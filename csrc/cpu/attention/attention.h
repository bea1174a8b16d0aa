// Which way attention on CPU tensors takes.
#pragma once

#include "ops/attention/checks.h"

namespace metalmm::cpu {

// Ours. Torch's attention over the time of attention_tile (AVX-512 of a Xeon, one thread, CPU time,
// heads of 128 values): 32 heads of q and 8 of keys, f32 0.9 at 17 queries of 17 slots, 1.3 at 128
// of 128, 1.6 at 512 of 512, 1.2 at 128 of 2048; bf16 0.8 at 17 of 17, 2.2 at 512 of 512, 1.6 at
// 128 of 2048. Less than 1 of 32 heads of keys and few slots alone: 0.6 at 24 of 24 (0.5 ms), 0.7
// at 64 of 64.
AttentionWay choose_way(const Problem& problem);

}  // namespace metalmm::cpu
