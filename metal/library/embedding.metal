// embedding of every format and dtype.
#include "../kernels/rows.h"

#include "../entry.h"
#include "../formats/all.h"

#define MM_EMBEDDING(dtype, T, format, Struct)                              \
  MM_KERNEL(embedding_##format##_##dtype,                                   \
            (MM_IN(long, ids, kSlotIds), MM_IN(uchar, weight, kSlotWeight), \
             MM_IN(T, scale, kSlotNorm), MM_OUT(T)),                        \
            metalmm::Embedding<metalmm::Struct, T>::run(ids, weight, scale, y, args, at))
#define MM_FORMAT(name, Struct) MM_EACH_DTYPE(MM_EMBEDDING, name, Struct)
#include "../formats/each.h"
