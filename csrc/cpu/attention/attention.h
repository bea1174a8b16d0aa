// Which way attention on CPU tensors takes.
#pragma once

#include "ops/attention/checks.h"

namespace metalmm::cpu {

// Torch's attention takes many queries of f32, and of bf16 on a machine that multiplies bf16, whose
// keys and values are dense and of their dtype. Its time over that of the matrices here (Zen 5, one
// thread, 32 heads of q and 8 of keys of 128 values, f32): 0.44 at 17 queries of 17 slots, 0.75 at
// 128 of 128, 1.02 at 512 of 512, 0.81 at 512 of 2048; bf16 0.53, 0.82, 1.08, 0.85. Of f16 it takes
// 2.8 times as long (bench/results.md).
AttentionWay choose_way(const Problem& problem);

}  // namespace metalmm::cpu
