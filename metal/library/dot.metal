// dot of every dtype.
#include "../entry.h"
#include "../kernels/probes.h"

#define MM_DOT(dtype, T, name)                                                       \
  MM_KERNEL(name##_##dtype, (MM_IN(T, x, kSlotX), MM_IN(T, x2, kSlotX2), MM_OUT(T)), \
            metalmm::Dot<T>::run(x, x2, y, args, memory, at))
MM_EACH_DTYPE(MM_DOT, dot)
