// rope_append of every format that is stored and every dtype.
#include "../layer/rope_append.h"

#include "../entry.h"
#include "../formats/all.h"

#define MM_ROPE_APPEND(dtype, T, format, Struct)                                                   \
  MM_KERNEL(rope_append_##format##_##dtype,                                                        \
            (MM_IN(T, x, kSlotX), MM_IN(T, x2, kSlotX2), MM_IN(T, cosines, kSlotCos),              \
             MM_IN(T, sines, kSlotSin), MM_IN(T, q_norm, kSlotNorm), MM_IN(T, k_norm, kSlotNorm2), \
             MM_IN(long, slots, kSlotIds), MM_OUT(T), MM_OUT_TO(uchar, keys, kSlotWeight),         \
             MM_OUT_TO(uchar, values, kSlotWeight2)),                                              \
            metalmm::RopeAppend<metalmm::Struct, T>::run({x, x2, cosines, sines, q_norm, k_norm},  \
                                                         y, {keys, values, slots}, args, at))
#define MM_STORED_FORMAT(name, Struct) MM_EACH_DTYPE(MM_ROPE_APPEND, name, Struct)
#include "../formats/each_stored.h"
