// rope_tables of every dtype.
#include "../layer/rope_tables.h"

#include "../entry.h"

#define MM_ROPE_TABLES(dtype, T, name)                                               \
  MM_KERNEL(name##_##dtype,                                                          \
            (MM_IN(long, positions, kSlotIds), MM_IN(float, frequencies, kSlotNorm), \
             MM_IN(long, axes, kSlotX2), MM_OUT(T), MM_OUT_TO(T, sines, kSlotY2)),   \
            metalmm::RopeTables<T>::run({positions, frequencies, axes}, y, sines, args, at))
MM_EACH_DTYPE(MM_ROPE_TABLES, rope_tables)
