// elementwise_add, _sub, _mul and _div of every dtype.
#include "../entry.h"
#include "../kernels/probes.h"

#define MM_ELEMENTWISE(dtype, T, name, Op)                                                         \
  MM_KERNEL(elementwise_##name##_##dtype, (MM_IN(T, x, kSlotX), MM_IN(T, x2, kSlotX2), MM_OUT(T)), \
            metalmm::Elementwise<metalmm::Op, T, T>::run(x, x2, y, args, at))
MM_EACH_DTYPE(MM_ELEMENTWISE, add, Add)
MM_EACH_DTYPE(MM_ELEMENTWISE, sub, Sub)
MM_EACH_DTYPE(MM_ELEMENTWISE, mul, Mul)
MM_EACH_DTYPE(MM_ELEMENTWISE, div, Div)
