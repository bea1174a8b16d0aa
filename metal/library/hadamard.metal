// hadamard of every dtype.
#include "../layer/hadamard.h"

#include "../entry.h"

#define MM_HADAMARD(dtype, T, name)                           \
  MM_KERNEL(name##_##dtype, (MM_IN(T, x, kSlotX), MM_OUT(T)), \
            metalmm::Hadamard<T>::run(x, y, args, at))
MM_EACH_DTYPE(MM_HADAMARD, hadamard)
