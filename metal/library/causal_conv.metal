// causal_conv of every dtype.
#include "../layer/causal_conv.h"

#include "../entry.h"

#define MM_CAUSAL_CONV(dtype, T, name)                                                     \
  MM_KERNEL(name##_##dtype,                                                                \
            (MM_IN(T, x, kSlotX), MM_IN(T, weight, kSlotNorm), MM_IN(T, bias, kSlotNorm2), \
             MM_OUT(T), MM_OUT_TO(T, state, kSlotY2)),                                     \
            metalmm::CausalConv<T>::run({x, weight, bias}, y, state, args, at))
MM_EACH_DTYPE(MM_CAUSAL_CONV, causal_conv)
