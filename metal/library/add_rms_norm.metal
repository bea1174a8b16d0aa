// add_rms_norm of every dtype.
#include "../layer/row_norm.h"

#include "../entry.h"

#define MM_ADD_RMS_NORM(dtype, T, name)                                                        \
  MM_KERNEL(name##_##dtype,                                                                    \
            (MM_IN(T, x, kSlotX), MM_IN(T, x2, kSlotX2), MM_IN(T, norm, kSlotNorm), MM_OUT(T), \
             MM_OUT_TO(T, sum, kSlotY2)),                                                      \
            metalmm::AddRmsNorm<T>::run(x, x2, norm, y, sum, args, memory, at))
MM_EACH_DTYPE(MM_ADD_RMS_NORM, add_rms_norm)
