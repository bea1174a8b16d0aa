// act_mul of every dtype of y.
#include "../entry.h"
#include "../kernels/probes.h"

#define MM_ACT_MUL(dtype, T, name)                                                           \
  MM_KERNEL(name##_##dtype, (MM_IN(float, x, kSlotX), MM_IN(float, x2, kSlotX2), MM_OUT(T)), \
            metalmm::GateUp<T>::run(x, x2, y, args, at))
MM_EACH_DTYPE(MM_ACT_MUL, act_mul)
