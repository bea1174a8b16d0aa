// swiglu_down of every format and dtype.
#include "../../kernels/swiglu.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_SWIGLU_DOWN(dtype, T, format, Struct)                                               \
  MM_KERNEL(swiglu_down_##format##_##dtype,                                                    \
            (MM_IN(T, gate, kSlotX), MM_IN(T, up, kSlotX2), MM_IN(uchar, weight, kSlotWeight), \
             MM_RESULT(T)),                                                                    \
            metalmm::SwigluDown<metalmm::Struct, T>::run(gate, up, weight, {y, bias, c}, args, \
                                                         memory, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_SWIGLU_DOWN, name, Struct)
#include "../../formats/each.h"
