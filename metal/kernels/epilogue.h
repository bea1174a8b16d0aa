// The end of every matmul: y = alpha * acc + bias + beta * c, or alpha * acc * bias + beta * c, in
// f32, soft-capped where asked, rounded once.
#pragma once

#include "../layer/soft_cap.h"

namespace metalmm {

// Result m, n. kEpiloguePartial leaves acc itself, f32 [parts, M, N]: for split_reduce, or as
// the result of a linear that is wanted in f32.
template <class T>
METAL_FUNC void store_result(Result<T> result, constant KernelArgs& args, uint part, uint m, uint n,
                             float acc) {
  if (fc_epilogue & kEpiloguePartial) {
    device float* partial = reinterpret_cast<device float*>(result.y);
    partial[((ulong)part * args.m + m) * args.n + n] = acc;
    return;
  }
  const long at = (long)m * args.y_stride + n;
  if (fc_epilogue & kEpilogueAlpha) acc *= args.alpha;
  if (fc_epilogue & kEpilogueBias) acc += float(result.bias[n]);
  if (fc_epilogue & kEpilogueFactors) acc *= float(result.bias[n]);
  if (fc_epilogue & kEpilogueC) acc = fma(args.beta, float(result.c[at]), acc);
  if (fc_epilogue & kEpilogueSoftcap) acc = soft_cap(acc, args.softcap);
  result.y[at] = T(acc);
}

}  // namespace metalmm
