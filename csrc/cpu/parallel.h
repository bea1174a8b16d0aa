// A loop over [begin, end) on torch's threads, torch.set_num_threads obeyed.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#if defined(__APPLE__)
#include <dispatch/dispatch.h>
#endif

#include "plan/round.h"

namespace metalmm::cpu {

// f(first, last) for disjoint ranges of at least `grain` that cover [begin, end).
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
#if defined(__APPLE__)
  // Apple's clang has no OpenMP, without which at::parallel_for runs on one thread; Homebrew's
  // libomp beside torch's aborts. f must not throw.
  const int64_t shares =
      std::min<int64_t>(at::get_num_threads(), ceil_div(end - begin, std::max<int64_t>(grain, 1)));
  if (shares <= 1 || at::in_parallel_region()) {
    if (begin < end) f(begin, end);
    return;
  }
  const int64_t share = ceil_div(end - begin, shares);
  dispatch_apply(shares, DISPATCH_APPLY_AUTO, ^(size_t i) {
    const int64_t first = begin + static_cast<int64_t>(i) * share;
    if (first < end) f(first, std::min(end, first + share));
  });
#else
  at::parallel_for(begin, end, grain, f);
#endif
}

// Rows of so many values below which a second thread costs more than it brings: 10 us of a pass
// over them.
inline int64_t row_grain(int64_t values) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(values, 1));
}
// Rows of W below which a second thread costs more than it brings: about 10 us of decoding.
inline int64_t weight_row_grain(int64_t k) {
  return std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(k, 1));
}

// f(i, first, last) for ranges of the n rows of each of `count` matrices of K values a row: one
// loop, whose threads meet once.
template <class F>
void over_rows(int64_t count, int64_t n, int64_t k, const F& f) {
  parallel_for(0, count * n, weight_row_grain(k), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t i = at / n, last = std::min(end, (i + 1) * n);
      f(i, at - i * n, last - i * n);
      at = last;
    }
  });
}

}  // namespace metalmm::cpu
