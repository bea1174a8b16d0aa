// expert_up of every format and dtype.
#include "../../entry.h"
#include "../../formats/all.h"
#include "../../kernels/experts.h"

#define MM_EXPERT_UP(dtype, T, format, Struct)                                                   \
  MM_KERNEL(expert_up_##format##_##dtype,                                                        \
            (MM_IN(T, x, kSlotX), MM_IN(long, ids, kSlotIds), MM_IN(uchar, gate, kSlotWeight),   \
             MM_IN(uchar, up, kSlotWeight2), MM_RESULT(T)),                                      \
            metalmm::ExpertGateUp<metalmm::Struct, T>::run(x, ids, gate, up, {y, bias, c}, args, \
                                                           memory, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_EXPERT_UP, name, Struct)
#include "../../formats/each.h"
