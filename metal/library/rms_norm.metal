// rms_norm of every dtype.
#include "../layer/row_norm.h"

#include "../entry.h"

#define MM_RMS_NORM(dtype, T, name)                                                   \
  MM_KERNEL(name##_##dtype,                                                           \
            (MM_IN(T, x, kSlotX), MM_IN(T, gate, kSlotX2), MM_IN(T, norm, kSlotNorm), \
             MM_IN(T, c, kSlotC), MM_OUT(T)),                                         \
            metalmm::RmsNorm<T>::run(x, gate, norm, c, y, args, memory, at))
MM_EACH_DTYPE(MM_RMS_NORM, rms_norm)
