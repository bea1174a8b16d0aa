// expert_down of every format and dtype.
#include "../../entry.h"
#include "../../formats/all.h"
#include "../../kernels/experts.h"

#define MM_EXPERT_DOWN(dtype, T, format, Struct)                                               \
  MM_KERNEL(expert_down_##format##_##dtype,                                                    \
            (MM_IN(T, x, kSlotX), MM_IN(uchar, scores, kSlotX2), MM_IN(long, ids, kSlotIds),   \
             MM_IN(uchar, weight, kSlotWeight), MM_RESULT(T)),                                 \
            metalmm::ExpertDown<metalmm::Struct, T>::run(x, scores, ids, weight, {y, bias, c}, \
                                                         args, memory, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_EXPERT_DOWN, name, Struct)
#include "../../formats/each.h"
