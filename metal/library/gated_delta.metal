// gated_delta of every dtype.
#include "../layer/gated_delta.h"

#include "../entry.h"

#define MM_GATED_DELTA(dtype, T, name)                                                             \
  MM_KERNEL(                                                                                       \
      name##_##dtype,                                                                              \
      (MM_IN(T, x, kSlotX), MM_IN(T, a, kSlotX2), MM_IN(T, b, kSlotC), MM_IN(T, a_log, kSlotNorm), \
       MM_IN(T, dt_bias, kSlotNorm2), MM_OUT(T), MM_OUT_TO(float, state, kSlotY2)),                \
      metalmm::GatedDelta<T>::run({x, a, b, a_log, dt_bias}, y, state, args, memory, at))
MM_EACH_DTYPE(MM_GATED_DELTA, gated_delta)
