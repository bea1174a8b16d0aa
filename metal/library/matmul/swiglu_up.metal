// swiglu_up of every format and dtype.
#include "../../kernels/swiglu.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_SWIGLU_UP(dtype, T, format, Struct)                                                \
  MM_KERNEL(swiglu_up_##format##_##dtype,                                                     \
            (MM_IN(T, x, kSlotX), MM_IN(T, norm, kSlotNorm), MM_IN(uchar, gate, kSlotWeight), \
             MM_IN(uchar, up, kSlotWeight2), MM_RESULT(T)),                                   \
            metalmm::SwigluGateUp<metalmm::Struct, T>::run({x, norm}, gate, up, {y, bias, c}, \
                                                           args, memory, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_SWIGLU_UP, name, Struct)
#include "../../formats/each.h"
