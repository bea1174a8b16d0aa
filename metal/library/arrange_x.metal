// arrange_x of every dtype.
#include "../kernels/arrange_x.h"

#include "../entry.h"

#define MM_ARRANGE_X(dtype, T, name)                                                \
  MM_KERNEL(name##_##dtype, (MM_IN(T, x, kSlotX), MM_OUT_TO(T, arranged, kSlotY2)), \
            metalmm::ArrangeX<T>::run(x, arranged, args, at))
MM_EACH_DTYPE(MM_ARRANGE_X, arrange_x)
