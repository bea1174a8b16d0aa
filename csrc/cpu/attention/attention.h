// Which way attention on CPU tensors takes.
#pragma once

#include "ops/attention/checks.h"

namespace metalmm::cpu {

// Ours: of 512 queries torch's flash attention takes 1.6 times as long in f32, 2.2 in bf16
// (bench/results.md). Of 17 to 64 queries of as few slots and as many heads of keys as of q torch's
// takes 0.6 to 0.7 of the time, which is less than a millisecond.
AttentionWay choose_way(const Problem& problem);

}  // namespace metalmm::cpu
