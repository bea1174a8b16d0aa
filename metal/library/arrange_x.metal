// arrange_x of halves: gemm_small takes 8 rows of the other dtypes at a time, as they lie.
#include "../kernels/arrange_x.h"

#include "../entry.h"

#define MM_ARRANGE_X(dtype, T, name)                                                \
  MM_KERNEL(name##_##dtype, (MM_IN(T, x, kSlotX), MM_OUT_TO(T, arranged, kSlotY2)), \
            metalmm::ArrangeX<T>::run(x, arranged, args, at))
MM_ARRANGE_X(f16, half, arrange_x)
