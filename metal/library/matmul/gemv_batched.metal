// gemv_batched of every format and dtype.
#include "../../kernels/gemv_batched.h"

#include "../../entry.h"
#include "../../formats/all.h"

#define MM_FORMAT(name, Struct) \
  MM_EACH_DTYPE(MM_GEMV_ARRANGED, gemv_batched, name, Struct, GemvBatch)
#include "../../formats/each.h"
