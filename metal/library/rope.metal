// rope of every dtype.
#include "../layer/rope.h"

#include "../entry.h"

#define MM_ROPE(dtype, T, name)                                                                    \
  MM_KERNEL(name##_##dtype,                                                                        \
            (MM_IN(T, x, kSlotX), MM_IN(T, x2, kSlotX2), MM_IN(T, cosines, kSlotCos),              \
             MM_IN(T, sines, kSlotSin), MM_IN(T, q_norm, kSlotNorm), MM_IN(T, k_norm, kSlotNorm2), \
             MM_OUT(T), MM_OUT_TO(T, k, kSlotY2), MM_OUT_TO(T, v, kSlotY3)),                       \
            metalmm::Rope<T>::run({x, x2, cosines, sines, q_norm, k_norm}, y, k, v, args, at))
MM_EACH_DTYPE(MM_ROPE, rope)
